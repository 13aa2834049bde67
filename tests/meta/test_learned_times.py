"""Stored times of tokens improve the predictions for later tokens. Damaged entries are ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from vkbackend.meta import learned_times
from vkbackend.meta.balance import Cost, predict, times_on
from vkbackend.meta.known_speed import remember
from vkbackend.meta.learned_times import (
    MOST,
    Token,
    cut_seconds,
    is_wrong,
    known_tokens,
    layer_seconds,
    remember_token,
)
from vkbackend.meta.rates import Rates
from vkbackend.twins.device import NumpyDevice

pytestmark = pytest.mark.no_vulkan


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))


def devices(n: int) -> list[NumpyDevice]:
    return [NumpyDevice(f"numpy.{d}") for d in range(n)]


def test_layers_and_cuts_are_learned() -> None:
    """A layer takes 10 us more than reading its weights, and an exchange takes 5 us more than the measured 30
    us."""
    one, two = devices(1), devices(2)
    assert layer_seconds(two) == cut_seconds(two) == 0.0
    for read_s in (1e-3, 2e-3, 4e-3):
        remember_token(one, Token(20, read_s, 0, 0.0, read_s, read_s + 20 * 10e-6))
    assert layer_seconds(one) == layer_seconds(two) == pytest.approx(10e-6)
    measured_s = 1e-3 + 20 * 10e-6 + 40 * 35e-6
    remember_token(two, Token(20, 1e-3, 40, 40 * 30e-6, 1e-3 + 40 * 30e-6, measured_s))
    assert cut_seconds(two) == pytest.approx(5e-6)
    cost = Cost((0, 0), (10**6, 10**6), (0, 0), (4096,) * 40, n_layers=20)
    rates = Rates(
        weights=1e9, host=1e18, exchange_s=30e-6, layer_s=layer_seconds(two), cut_s=cut_seconds(two)
    )
    assert times_on(two, (1, 1), cost, rates).total_ms == pytest.approx(1e3 * measured_s)
    # assumed speeds use no stored times
    assumed = times_on(two, (1, 1), cost, Rates(weights=1e9, host=1e18, exchange_s=30e-6))
    assert assumed.layers_ms == 0 and assumed.total_ms == pytest.approx(2.2)


def test_a_group_limits_the_time_of_its_layers() -> None:
    """Alone, a device takes 1 ms per layer. With a small share of each layer, it takes 50 us."""
    slow, two = [NumpyDevice("slow")], [NumpyDevice("slow"), NumpyDevice("fast")]
    remember_token(slow, Token(20, 1e-3, 0, 0.0, 1e-3, 1e-3 + 20 * 1e-3))
    assert layer_seconds(two) == layer_seconds(slow) == pytest.approx(1e-3)
    exchanges_s = 40 * 30e-6
    for _ in range(3):
        remember_token(two, Token(20, 1e-3, 40, exchanges_s, 1e-3, 1e-3 + 20 * 50e-6 + exchanges_s))
    assert layer_seconds(two) == pytest.approx(50e-6) and cut_seconds(two) == pytest.approx(0)
    assert layer_seconds(slow) == pytest.approx(1e-3)


def test_faster_tokens_than_predicted_teach_no_negative_times() -> None:
    one = devices(1)
    remember_token(one, Token(20, 2e-3, 0, 0.0, 2e-3, 1e-3))
    assert layer_seconds(one) == 0.0


def test_the_last_tokens_are_kept_and_damaged_ones_ignored() -> None:
    one = devices(1)
    for n in range(MOST + 4):
        remember_token(one, Token(20, 1e-3, 0, 0.0, 1e-3, 1e-3 * (n + 1)))
    assert [round(1e3 * of.measured_s) for of in known_tokens(one)] == list(range(5, MOST + 5))
    good = [20.0, 1e-3, 0.0, 0.0, 1e-3, 2e-3]
    bad = [
        [],
        "x",
        [*good[:5], "fast"],
        [*good[:5], -1.0],
        [0.0, *good[1:]],
        [*good, 1.0],
        [*good[:5], float("nan")],
    ]
    remember(learned_times._key(one), [*bad, good])
    assert known_tokens(one) == [Token(*good)]
    remember(learned_times._key(one), {"rows": 3})
    assert known_tokens(one) == [] and layer_seconds(one) == 0.0


def test_wrong_predictions() -> None:
    assert is_wrong(79.0, 100.0) and is_wrong(121.0, 100.0) and not is_wrong(81.0, 100.0)


def line(exchange_us: float, split: bool = True) -> str:
    """Return the last line of a plan for two devices that read 1 GB/s. Each device reads 8 MB, or half of
    this if `split`."""

    def cost(shares: tuple[float, ...]) -> Cost:
        read = tuple(round(8e6 * share / sum(shares)) if split else 8_000_000 for share in shares)
        return Cost(read, read, (0, 0), (4096,) * 40 if all(shares) else ())

    rates = Rates(weights=1e9, host=1e18, exchange_s=1e-6 * exchange_us)
    return predict(devices(2), (1, 1), cost, rates=rates).lines(["a", "b"])[-1]


def test_the_plan_says_what_would_change_the_result() -> None:
    """The split saves 4 of 8 ms, so 40 exchanges may take 100 us each."""
    faster = (
        "together 1.33 times as fast as a alone; faster while an exchange takes less than 100 us (now 50)"
    )
    assert line(50) == faster
    assert line(150).endswith("faster only if an exchange takes less than 100 us (now 150)")
    assert "slower even with exchanges that take no time" in line(50, split=False)
