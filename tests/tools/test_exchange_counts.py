"""The study exchange_counts counts calls per exchange."""

from __future__ import annotations

import sys

import pytest
from device_sets import MULTI

from vkbackend.meta import bench
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.options import ReduceOptions
from vkbackend.tools.studies import exchange_counts

pytestmark = pytest.mark.native


@pytest.mark.parametrize("devices", [p for p in MULTI if p.id == "0,0"])
def test_events_replace_signals_and_flags_replace_reads(
    devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "MAX_LENGTH", 8)
    monkeypatch.setattr(exchange_counts, "REPEATS", 3)
    calls = {}
    for signal in ("semaphore", "event"):
        how = exchange_counts.options_of("host-sum", signal, "0")
        calls[signal], cpu_s, median, exact = exchange_counts.measured(devices, 4096, how)
        assert exact and 0 < cpu_s and 0 < median
    # A step of 8 exchanges has 9 segments on each of two devices.
    assert calls["semaphore"]["submit"] == calls["event"]["submit"] == 2 * 9 / 8
    assert calls["semaphore"]["signal"] == 2 * 9 / 8 and calls["event"]["signal"] < 1
    assert calls["event"]["set event"] == calls["event"]["reset event"] == 2
    assert calls["semaphore"]["device waits"] == 2


@pytest.mark.parametrize("devices", [p for p in MULTI if p.id == "0,0"])
def test_one_call_is_one_submission_per_step(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MAX_LENGTH", 8)
    monkeypatch.setattr(exchange_counts, "REPEATS", 3)
    how = exchange_counts.options_of("visible", "semaphore", "one-call")
    calls, *_, exact = exchange_counts.measured(devices, 4096, how)
    assert exact and calls["submit"] == 2 / 8 and calls["signal"] == 2 * 9 / 8


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_of_each_way(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts equal the formulas of docs/multi-gpu.md, for n devices and a sum of S bytes."""
    monkeypatch.setattr(bench, "MAX_LENGTH", 8)
    size = 16_384
    for provider, read, host in [
        ("pages", n * (n - 1) * size, 0),
        ("scatter", (2 * n - 1) * size, 0),
        ("ring", n * (n - 1) * size, 0),
        ("tree", n * (n - 1) * size, 0),
        ("host-sum", n * size, 2 * n * size),
        ("visible", 0, 2 * n * size),
        ("copies", n * (n - 1) * size, 0),
    ]:
        how = ReduceOptions(reduce_type="f32", reduce_provider=provider)
        counts, *_, exact = exchange_counts.measured(["numpy"] * n, size, how)
        assert exact and counts["host read"] + counts["host written"] == host
        assert counts["read"] == read, provider
        written = {"scatter": (n + 1) * size, "ring": n * (n - 1) * size, "tree": n * (n - 1) * size}
        assert counts["written"] == written.get(provider, n * size), provider


def test_slow_steps_are_counted_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    """System calls are divided by the number of steps, so no time limit may end the run earlier."""
    monkeypatch.setattr(bench, "LIMIT_S", 0.0)
    run, n_runs = Mesh.run, []
    monkeypatch.setattr(Mesh, "run", lambda *args: n_runs.append(args) or run(*args))
    exchange_counts.run_steps(["numpy"] * 2, 4096, ReduceOptions(), 3)
    assert len(n_runs) == 1 + 3


def test_events_need_sums_that_the_host_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["exchange_counts", "--signals", "event"])
    with pytest.raises(SystemExit):
        exchange_counts.main()
    assert "--providers host-sum or visible" in capsys.readouterr().err


@pytest.mark.no_vulkan
def test_the_total_of_strace() -> None:
    summary = """% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 71.39    0.016470           2      6170       120 futex
------ ----------- ----------- --------- --------- ----------------
100.00    0.023070           2     10180       167 total
"""
    assert exchange_counts.total_of(summary) == 10_180
