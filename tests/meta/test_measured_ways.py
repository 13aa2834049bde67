"""For each size, `tune` stores the fastest exact way to exchange sums. Predictions use its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from vkbackend.meta import measured_ways
from vkbackend.meta.bench import ReduceTime
from vkbackend.meta.host_sum import VisibleSum
from vkbackend.meta.known_speed import numbers, reduce_key, remember
from vkbackend.meta.known_ways import ONE_CALL, Ahead, Choice, known_choice, remember_choice
from vkbackend.meta.measured_ways import DEPTHS, SURE_STEPS, Measured, choice_of, keep, measure_ways
from vkbackend.meta.options import AHEAD, ReduceOptions
from vkbackend.meta.speed import measure_reduce
from vkbackend.meta.ways import HOST_WRITTEN, WAYS
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.runtime import SIGNALS
from vkbackend.tools import cli, tune

SMALL, TOKEN, LARGE = 4096, measured_ways.TOKEN_NBYTES, 1 << 20


def row(
    nbytes: int,
    provider: str,
    us: float,
    signal: str = "semaphore",
    ahead: Ahead = AHEAD,
    exact: bool = True,
    n_checked: int = 12,
) -> Measured:
    return Measured(nbytes, provider, signal, ahead, us, exact, n_checked)


def test_a_way_must_be_clearly_faster_and_exact() -> None:
    rows = [
        *(row(SMALL, "pages", 100), row(SMALL, "visible", 50), row(SMALL, "host-sum", 10, exact=False)),
        *(row(TOKEN, "pages", 100), row(TOKEN, "pieces", 91)),
        *(row(LARGE, "pages", 100), row(LARGE, "pieces", 80)),
    ]
    assert choice_of(rows) == Choice(
        ((SMALL, "visible"), (TOKEN, "pages"), (1 << 40, "pieces")), "semaphore", 2
    )
    rows += [
        row(TOKEN, "pages", 95, "flag"),
        row(TOKEN, "pages", 70, "flag", 0),
        row(TOKEN, "pieces", 1, "flag"),
    ]
    rows += [row(TOKEN, "pages", 2, "flag", None, exact=False)]
    chosen = choice_of(rows)
    assert chosen and (chosen.signal, chosen.ahead) == ("flag", 0)
    assert choice_of([row(SMALL, "pages", 1, exact=False)]) is None


def test_events_must_be_exact_in_many_steps() -> None:
    rows = [row(TOKEN, "pages", 100), row(LARGE, "pages", 900), row(TOKEN, "visible", 95)]
    rows += [row(TOKEN, "visible", 10, "event"), row(TOKEN, "host-sum", 80, "event", n_checked=SURE_STEPS)]
    larger = (1 << 40, "pages")
    assert choice_of(rows) == Choice(((TOKEN, "host-sum"), larger), "event", AHEAD)
    rows += [row(TOKEN, "visible", 60, "flag+event", n_checked=SURE_STEPS)]
    assert choice_of(rows) == Choice(((TOKEN, "visible"), larger), "flag+event", AHEAD)


def test_smaller_sums_keep_a_way_that_is_faster() -> None:
    """A trial is measured at one size."""
    rows = [row(TOKEN, "pages", 100), row(LARGE, "scatter", 900)]
    rows += [row(TOKEN, "visible", 80, "event", n_checked=SURE_STEPS)]
    after = ((TOKEN, "visible"), (1 << 40, "scatter"))
    for us, expected in ((20, ((SMALL, "pages"), *after)), (90, after)):
        assert choice_of([row(SMALL, "pages", us), *rows]) == Choice(expected, "event", AHEAD)


def test_one_call_must_be_exact_in_many_steps() -> None:
    rows = [row(SMALL, "pages", 70), row(TOKEN, "pages", 100), row(LARGE, "pieces", 900)]
    rows += [row(TOKEN, "pages", 80, "flag"), row(TOKEN, "host-sum", 20, ahead=ONE_CALL, n_checked=299)]
    rows += [row(TOKEN, "host-sum", 10, "flag", ONE_CALL, False, SURE_STEPS)]
    rows += [row(TOKEN, "visible", 73, ahead=ONE_CALL, n_checked=SURE_STEPS)]
    usual = Choice(((TOKEN, "pages"), (1 << 40, "pieces")), "flag", AHEAD)
    assert choice_of(rows) == usual  # 73 is not clearly less than 80
    rows += [row(TOKEN, "visible", 60, ahead=ONE_CALL, n_checked=SURE_STEPS)]
    larger = ((TOKEN, "visible"), (1 << 40, "pieces"))
    assert choice_of(rows) == Choice(larger, "semaphore", ONE_CALL)
    # A provider that is best for larger sums, too, needs no range of its own.
    rows = [row(TOKEN, "visible", 100), row(TOKEN, "visible", 60, "flag", ONE_CALL, n_checked=SURE_STEPS)]
    assert choice_of(rows) == Choice(((1 << 40, "visible"),), "flag", ONE_CALL)


def test_a_kept_step_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    devices = open_devices(["numpy", "numpy"])
    choice = Choice(((TOKEN, "visible"), (1 << 40, "pages")), "flag", ONE_CALL)
    rows = [row(TOKEN, "visible", 100), row(TOKEN, "visible", 30, "flag", ONE_CALL, n_checked=SURE_STEPS)]
    keep(devices, rows, choice)
    assert known_choice(devices) == choice and measure_reduce(devices, TOKEN) == pytest.approx(30e-6)
    assert ReduceOptions().relaying(devices) == (ONE_CALL, "flag")
    # No event may be set after the call that submits its wait, so a given option decides.
    assert ReduceOptions(reduce_signal="event").relaying(devices) == (AHEAD, "event")
    remember_choice(devices, Choice(choice.ways, "event", 1))
    assert ReduceOptions(submit_ahead=ONE_CALL).relaying(devices) == (ONE_CALL, "semaphore")
    remember_choice(devices, Choice(choice.ways, "flag+event", ONE_CALL))
    assert known_choice(devices) is None


def test_neighbouring_sizes_with_one_way_are_one_range() -> None:
    rows = [row(nbytes, "pages", 1.0) for nbytes in (SMALL, TOKEN, LARGE)]
    assert choice_of(rows) == Choice(((1 << 40, "pages"),), "semaphore", AHEAD)


def test_kept_times_are_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    devices = open_devices(["numpy", "numpy"])
    rows = [row(TOKEN, "pages", 100), row(TOKEN, "visible", 50), row(TOKEN, "visible", 20, "flag")]
    chosen = choice_of(rows)
    assert chosen == Choice(((1 << 40, "visible"),), "flag", AHEAD)
    keep(devices, rows, chosen)
    assert known_choice(devices) == chosen and measure_reduce(devices, TOKEN) == pytest.approx(20e-6)
    assert ReduceOptions().relaying(devices) == (AHEAD, "flag")
    # Another choice makes the times of all sizes invalid, also of sizes that `tune` does not measure.
    three = [*devices, *devices[:1]]
    for of in (devices, three):
        remember(reduce_key(of, 2 * TOKEN), [1e-3])
    assert measure_reduce(devices, 2 * TOKEN) == 1e-3
    keep(devices, rows[:1], Choice(((1 << 40, "pages"),), "semaphore", 2))
    assert measure_reduce(devices, TOKEN) == pytest.approx(100e-6)
    assert not numbers(reduce_key(devices, 2 * TOKEN)) and numbers(reduce_key(three, 2 * TOKEN)) == [1e-3]
    remember_choice(devices, None)
    assert not numbers(reduce_key(devices, TOKEN))
    keep(devices, rows, chosen)
    assert ReduceOptions(submit_ahead="all", reduce_signal="event").relaying(devices) == (None, "event")


def test_every_way_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_ways, "SURE_STEPS", 6)
    rows = list(measure_ways(lambda: open_devices(["numpy"] * 2), 2, (SMALL, TOKEN)))
    assert all(row.exact and row.us > 0 for row in rows)
    first = [(row.nbytes, row.provider) for row in rows if row.signal == "semaphore" and row.ahead == AHEAD]
    names = [way.name for way in WAYS if way.n_tuned == 2]
    assert first == [(nbytes, name) for nbytes in (SMALL, TOKEN) for name in names]
    # numpy has no other signals
    depths, n_one_call = [ahead for ahead in DEPTHS if ahead != AHEAD], len(HOST_WRITTEN)
    assert [row.ahead for row in rows[len(first) :]] == [*depths, *[ONE_CALL] * n_one_call]
    assert [row.provider for row in rows[-n_one_call:]] == [*HOST_WRITTEN]
    # In each of two rounds, a step warms up. Its sums are checked as well.
    assert all(row.n_checked == 2 * (1 + 6 // 2) and row.is_sure for row in rows[-n_one_call:])


def test_ways_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow round, or a round with a wrong sum, is not the whole result."""
    names = [way.name for way in WAYS if way.n_tuned == 2]
    seen: list[str] = []

    def timed(devices: object, nbytes: int, how: ReduceOptions, **more: float) -> ReduceTime:
        seen.append(how.reduce_provider)
        first = seen.count(how.reduce_provider) == 1
        return ReduceTime(nbytes, (9e-3 if first else 1e-3,), first or how.reduce_provider != "visible")

    monkeypatch.setattr(measured_ways, "time_reduce", timed)
    rows = list(measure_ways(lambda: [], 2, (SMALL,)))
    assert seen == [*names, *names]
    assert [(row.provider, round(row.us), row.exact) for row in rows] == [
        (name, 1000, name != "visible") for name in names
    ]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "measure_ways", lambda opening, n: measure_ways(opening, n, (TOKEN,)))
    monkeypatch.setattr(measured_ways, "SURE_STEPS", 6)
    # A way with wrong sums is shown and never chosen.
    monkeypatch.setattr(VisibleSum, "spread", lambda self, reduce: None)
    command = ["tune", "--exchanges", "-dev", "numpy,numpy,numpy"]
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    assert "exchanges between numpy numpy numpy" in out and "visible" in err
    assert out.count("WRONG") == 2 * len((AHEAD, ONE_CALL)) and "ahead one-call" in err
    groups = [open_devices(["numpy"] * n) for n in (2, 3)]
    for devices in groups:
        choice = known_choice(devices)
        assert choice and "visible" not in dict(choice.ways).values() and choice.signal in SIGNALS
        assert numbers(reduce_key(devices, TOKEN)) and measure_reduce(devices, TOKEN) > 0
    assert cli.main([*command, "--forget"]) == 0
    assert [known_choice(devices) for devices in groups] == [None, None]
    assert cli.main(["tune", "--exchanges", "-dev", "numpy"]) == 2
