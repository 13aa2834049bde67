from __future__ import annotations

import csv
import io
import json
import time

import pytest
from device_sets import device_infos

from vkbackend.errors import InvalidArgument
from vkbackend.tools import bench_ops, cli
from vkbackend.tools.measure import case_times
from vkbackend.tools.op_cases.cases import cases_named
from vkbackend.tools.op_cases.matrix import MatVec
from vkbackend.tools.op_cases.rows import Add
from vkbackend.twins.device import NullDevice

DEVICES = ["numpy", *(str(info.index) for info in device_infos()[:1])]


@pytest.mark.parametrize("spec", DEVICES)
def test_rows_in_every_format(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = f"bench-ops -dev {spec} --shapes tests -r 2 --ms 1 -c ^Add.n= -o".split()
    for output in ("md", "csv", "json"):
        assert cli.main([*args, output]) == 0
        text = capsys.readouterr().out
        if output == "json":
            rows = json.loads(text)
            assert [row["runs"] for row in rows] == ["add.f32"] * 2
            assert [row["nbytes"] for row in rows] == [3 * 4 * 1, 3 * 4 * 1031]
            assert all(0 < row["us_min"] <= row["us_median"] for row in rows)
        elif output == "csv":
            table = list(csv.reader(io.StringIO(text)))
            assert tuple(table[0]) == bench_ops.COLUMNS and [row[2] for row in table[1:]] == ["add.f32"] * 2
        else:
            assert text.count("| add.f32 |") == 2


def test_cases_that_a_device_cannot_run_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    case = r"Mat(Wave|Lane).type='f32', n=1, k=1,"
    assert cases_named(case, "tests")
    assert cli.main(["bench-ops", "-dev", "numpy", "--shapes", "tests", "-c", case]) == 2
    err = capsys.readouterr().err
    assert "lacks full_subgroups, subgroup_arithmetic" in err and "no case could run" in err


def test_a_case_that_only_tests_have_names_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench-ops", "-dev", "numpy", "-c", "^Rope"]) == 2
    assert "--shapes tests" in capsys.readouterr().err


def test_a_chain_has_the_given_length_and_cycles_through_copies() -> None:
    device = NullDevice("null")
    chain = case_times.Chain(device, MatVec("q4_0", 64, 64), cold_nbytes=20_000)
    assert len(chain.placed) > 2 and chain.flops == 2 * 64 * 64
    chain.seconds(7, 3)
    assert device.executed["mat_vec"] == 7 * 4
    buffers = {c.args[0].buffer for c in chain.recording(7).accesses()}  # type: ignore[union-attr]
    assert len(buffers) == min(7, len(chain.placed))
    chain.close()
    assert not device.counts["buffer"]


@pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")
def test_timestamps_are_within_their_submissions(device: object, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = case_times.Chain(device, Add(200_003))  # type: ignore[arg-type]
    monkeypatch.setattr(case_times, "has_clock", lambda device: True)
    try:
        began = time.perf_counter()
        each = chain.seconds(20, 5)
        whole = time.perf_counter() - began
    finally:
        chain.close()
    assert len(each) == 100 and 0 < sum(each) <= whole


def test_unknown_cases_are_reported() -> None:
    with pytest.raises(InvalidArgument, match="matches none"):
        cases_named("nothing", "all")
    with pytest.raises(InvalidArgument, match="regular expression"):
        cases_named("(", "all")
