"""The numpy view and the GLSL blocks of StepParams have the same layout."""

from __future__ import annotations

import re

import numpy as np
import pytest
from places import ROOT

from vkbackend import ops
from vkbackend.ops import MAX_VEC_ROWS
from vkbackend.step import BLOCK_NBYTES, FEW_ROWS, MAX_ROWS, MAX_RUNS, Mix, Run, StepParams, step_words

pytestmark = pytest.mark.no_vulkan


GLSL = (ROOT / "shaders" / "lib" / "step.glsl").read_text(encoding="utf-8")
ROWS_GLSL = (ROOT / "shaders" / "lib" / "step_rows.glsl").read_text(encoding="utf-8")


def glsl_fields() -> dict[str, tuple[int, int]]:
    block = re.search(r"std140\) uniform StepParams \{(.*?)\}", GLSL, re.DOTALL)
    assert block
    fields, at = {}, 0
    for line in filter(None, (line.partition("//")[0].strip() for line in block[1].splitlines())):
        member = re.fullmatch(r"uvec4 (\w+)(?:\[(\d+)\])?;", line)
        assert member, f"std140 lays out {line!r} in a way this test does not know"
        words = 4 * int(member[2] or 1)
        fields[member[1]], at = (at, words), at + words
    return fields


def test_layout_equals_the_shaders() -> None:
    step = StepParams()
    fields = glsl_fields()
    assert list(fields) == ["header", "runs", "states"]
    base = step.words.ctypes.data
    for name, (first, words) in fields.items():
        array = getattr(step, name)
        assert (array.ctypes.data - base, array.size) == (4 * first, words), name
    assert 4 * sum(words for _, words in fields.values()) == BLOCK_NBYTES


def test_rows_follow_the_block() -> None:
    [skipped] = re.findall(r"uvec4 block\[(\d+)\]; // StepParams\n    uvec4 rows\[\];", ROWS_GLSL)
    step = StepParams()
    assert step.rows.ctypes.data - step.words.ctypes.data == 16 * int(skipped) == BLOCK_NBYTES
    assert step.rows.shape == (MAX_ROWS, 4) and step.words.size == step_words(MAX_ROWS)


def test_block_fits_any_device() -> None:
    assert BLOCK_NBYTES <= 16_384


def test_cell_block_equals_the_shaders() -> None:
    match = re.search(r"const uint CELL_BLOCK = (\d+);", GLSL)
    assert match and int(match[1]) == ops.CELL_BLOCK


def test_fill_describes_runs_rows_and_outputs() -> None:
    step = StepParams(np.full(step_words(8), 0xDEADBEEF, np.uint32))
    step.fill([11, 12, 13, 14], [Run(2, 0, 3, 7), Run(0, 3, 1, 40)], [2, 3])
    assert (step.n_rows, step.n_runs, step.n_outputs) == (4, 2, 2)
    assert step.header.tolist() == [4, 2, 2, 4]
    assert step.runs[:2].tolist() == [[2, 0, 3, 7], [0, 3, 1, 40]]
    assert step.rows[:4, :3].tolist() == [[7, 2, 11], [8, 2, 12], [9, 2, 13], [40, 0, 14]]
    assert step.outputs[:2].tolist() == [2, 3] and step.states[:2, :2].tolist() == [[2, 2], [0, 0]]
    assert step.used.size == step_words(4) and (step.rows[4:] == 0xDEADBEEF).all()


@pytest.mark.parametrize(("rows", "runs"), [(MAX_ROWS + 1, 1), (1, MAX_RUNS + 1)])
def test_too_large_steps_are_refused(rows: int, runs: int) -> None:
    with pytest.raises(AssertionError):
        StepParams().fill([0] * rows, [Run(0, 0, 1, 0)] * runs, [])


def test_rows_of_few_runs_have_state_cells() -> None:
    """In a step with few rows, `cells_after` contains the cell of the state after each row."""
    assert FEW_ROWS == MAX_VEC_ROWS
    step = StepParams()
    runs = [Run(4, 0, 1, 7), Run(0, 1, 3, 9, (5, 6, 7, 5)), Run(1, 4, 2, 3, (8, 9)), Run(2, 6, 2, 1)]
    step.fill([1] * 8, runs, [7], Mix.FEW)
    assert step.states[:4, :2].tolist() == [[4, 4], [5, 5], [8, 9], [2, 2]]
    assert step.cells_after.tolist() == [4, 6, 7, 5, 9, 9, 2, 2]
