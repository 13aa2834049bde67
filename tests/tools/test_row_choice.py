"""Counted instructions determine which op is chosen for each number of rows."""

from __future__ import annotations

import pytest

from vkbackend.tools.measure import compilers
from vkbackend.tools.studies import row_choice
from vkbackend.tools.studies.row_choice import COLUMNS, ROWS, Cost, table_row


def test_a_row_of_the_table() -> None:
    """In this table, `mat_dot` is limited by memory up to 8 rows, and by instructions for more rows. For
    16 rows, `mat_wave` is twice as fast."""
    costs = [Cost(n, "mat_dot", True, 10.0, 1.25 * n) for n in ROWS]
    other = [Cost(n, "mat_wave", False, 10.0, 7.5 if n in (12, 16) else 5.0 * n) for n in ROWS]
    row = dict(zip(COLUMNS, table_row("A", "q4_0", [*costs, *other]), strict=True))
    assert (row["GPU"], row["8 rows"], row["512 rows"]) == ("A", "dot 10", "dot 640")
    assert row["largest growth for a row"] == "1.00 from 384 to 512"
    assert row["slowest choice"] == "2.00 x mat_wave at 16"


@pytest.mark.parametrize(
    ("gpu", "kind"), [("NAVI21", "q4_k"), pytest.param("BMG", "q8_0", marks=pytest.mark.wide)]
)
def test_no_cliff_and_no_op_that_is_much_slower(gpu: str, kind: str) -> None:
    if why := compilers.missing(compilers.GPUS[gpu]):
        pytest.skip(why)
    asked = compilers.ask(compilers.gpu_of(gpu), row_choice.MODULE, ["--alone", "-g", gpu, "-t", kind])
    row = dict(zip(COLUMNS, table_row(gpu, kind, [Cost(**cost) for cost in asked]), strict=True))
    assert float(row["largest growth for a row"].split()[0]) < 1.4
    # By this count, int8 on BMG's matrix units is 1.27 times as fast as F16. If F16 matrix instructions hide
    # vector instructions, int8 is slower (docs/measurements/kernels.md).
    assert row["slowest choice"] == "-" or float(row["slowest choice"].split()[0]) < 1.3
