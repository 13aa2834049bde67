from __future__ import annotations

import csv
import io
import json
from functools import partial

import numpy as np
import pytest
from device_sets import MULTI, covering, product

from vkbackend.errors import InvalidArgument
from vkbackend.meta import bench
from vkbackend.meta.host_sum import HostSum
from vkbackend.meta.options import ReduceOptions
from vkbackend.meta.ways import PROVIDERS
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.tools import bench_reduce, cli
from vkbackend.tools.bench_reduce import COLUMNS
from vkbackend.tools.measure.reduce_sizes import parse_size
from vkbackend.twins.device import NumpyDevice

HOST_SUM = ReduceOptions(reduce_provider="host-sum")
WAYS = (0, "f32"), (1, "bf16"), (4, "f16"), (None, "bf16")
SMALL = ("--sizes", "4K", "--repetitions", "2")


@pytest.mark.parametrize(
    ("ahead", "wire", "devices", "provider"),
    covering(
        [pytest.param(*how, id="-".join(map(str, how))) for how in WAYS],
        product([p for p in MULTI if p.id in ("0,0,0", "0,1")], PROVIDERS),
        each=4,
    ),
)
def test_sums_are_exact(ahead: int | None, wire: str, devices: list[str], provider: str) -> None:
    how = ReduceOptions(reduce_provider=provider, submit_ahead=ahead, reduce_type=wire)
    result = bench.time_reduce(open_devices(devices), 12 << 10, how, repeats=2, length=7)
    assert result.exact and len(result.seconds) == 2 and min(result.seconds) > 0


@pytest.mark.parametrize("wrong_at", [0, 5, 6])
def test_a_wrong_value_in_a_sum_is_reported(wrong_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, seen = HostSum.exchange, []

    def tampered(self: HostSum, reduce: object) -> None:
        exchange(self, reduce)  # type: ignore[arg-type]
        if len(seen) % 7 == wrong_at:
            parity = reduce.parity  # type: ignore[attr-defined]
            for device, buffer in zip(self._devices, self._buffers, strict=True):
                at = (2 + parity) * self._slot + 4
                np.asarray(buffer.host)[at : at + 4].view(np.float32)[:] += 1
                device.flush(buffer)
        seen.append(reduce)

    monkeypatch.setattr(HostSum, "exchange", tampered)
    devices = [NumpyDevice("a"), NumpyDevice("b")]
    assert not bench.time_reduce(devices, 4096, HOST_SUM, repeats=1, length=7).exact


def test_stale_slots_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostSum, "exchange", lambda self, reduce: None)
    devices = [NumpyDevice("a"), NumpyDevice("b")]
    assert not bench.time_reduce(devices, 4096, HOST_SUM, repeats=1, length=6).exact


def test_every_step_has_an_even_number_of_reduces_within_bounds() -> None:
    for size in range(12, 26):
        length = bench.chain_length(1 << size)
        assert 4 <= length <= 32 and length % 2 == 0


def test_command_benches_every_count_of_the_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_reduce, "time_reduce", partial(bench.time_reduce, length=4))
    command = ["bench-reduce", "-dev", "numpy,numpy,numpy", *SMALL]
    assert cli.main([*command, "-o", "json", "--ahead", "0,all"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert [len(row["devices"]) for row in rows] == [2] * len(rows[: len(rows) // 2]) + [3] * (len(rows) // 2)
    assert {(row["provider"], row["wire"]) for row in rows} == {
        (p, w) for p in PROVIDERS for w in ("f32", "bf16", "f16")
    }
    assert {(row["provider"], row["ahead"]) for row in rows} == {
        (p, a) for p in PROVIDERS for a in ("0", "all")
    }
    for row in rows:
        assert row["exact"] and row["nbytes"] == 4096 and 0 < row["us_min"] <= row["us"] <= row["us_max"]
        assert row["gb_per_s"] == pytest.approx(4096 / row["us"] / 1e3)
    assert f"[{len(rows)}/{len(rows)}]" in err


def test_tables_and_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["bench-reduce", "-dev", "numpy,numpy", *SMALL, "--ahead", "all"]
    command += ["--providers", "host-sum", "--wires", "bf16"]
    assert cli.main([*command, "-o", "csv"]) == 0
    [header, row] = csv.reader(io.StringIO(capsys.readouterr().out))
    assert tuple(header) == COLUMNS and row[-1] == "exact"
    monkeypatch.setattr(HostSum, "exchange", lambda self, reduce: None)
    assert cli.main(command) == 1
    assert "| 3 of 3 WRONG |" in capsys.readouterr().out


def test_wrong_sums_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of every step are checked, not only of the last one."""
    exchange, seen = HostSum.exchange, []

    def tampered(self: HostSum, reduce: object) -> None:
        if len(seen) // 6 != 1:  # not in the second step, whose sums are stale
            exchange(self, reduce)  # type: ignore[arg-type]
        seen.append(reduce)

    monkeypatch.setattr(HostSum, "exchange", tampered)
    devices = [NumpyDevice("a"), NumpyDevice("b")]
    result = bench.time_reduce(devices, 4096, HOST_SUM, repeats=3, length=6)
    assert (result.exact, result.n_wrong, result.n_checked) == (False, 1, 4)
    devices = [NumpyDevice("a"), NumpyDevice("b")]
    last = bench.time_reduce(devices, 4096, HOST_SUM, repeats=3, length=6, check_all=False)
    assert (last.exact, last.n_checked) == (True, 1)


def test_one_call(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench-reduce", "-dev", "numpy,numpy", *SMALL, "--ahead", "one-call", "--wires", "f32"]
    assert cli.main([*command, "-o", "json"]) == 0
    out, err = capsys.readouterr()
    assert [row["provider"] for row in json.loads(out)] == ["host-sum", "visible"]
    assert all(row["exact"] and row["n_checked"] == 3 for row in json.loads(out))
    assert err.count("left out") == len(PROVIDERS) - 2


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("-dev", "numpy"), "numpy"),
        (("--providers", "pigeon"), "pigeon"),
        (("--sizes", "5"), "'5'"),
        (("--ahead", "some"), "some"),
        (("-r", "0"), "0"),
        (("--wires", ""), "empty"),
    ],
)
def test_bad_values_are_named(args: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench-reduce", "-dev", "numpy,numpy", *args]) == 2
    out, err = capsys.readouterr()
    assert not out and named in err


def test_sizes() -> None:
    assert [parse_size(text) for text in ("4096", "4K", "32M", "12")] == [4096, 4096, 32 << 20, 12]
    for text in ("0", "6", "20K", "1G", "512M", "-4", "K"):
        with pytest.raises(InvalidArgument, match=text):
            parse_size(text)
