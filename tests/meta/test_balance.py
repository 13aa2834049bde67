"""The tests of the automatic split use invented speeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkbackend.meta import rates
from vkbackend.meta.balance import (
    Cost,
    Prediction,
    Shares,
    Times,
    auto_split,
    fitted,
    overfull,
    predict,
    ratios,
    subsets,
    times,
)
from vkbackend.meta.known_speed import Speed
from vkbackend.meta.rates import Rates
from vkbackend.twins.device import NumpyDevice

pytestmark = pytest.mark.no_vulkan


@dataclass(frozen=True)
class Budget:
    nbytes: int
    members: tuple[int, ...]


def shared_out(total: int, shares: Shares) -> tuple[int, ...]:
    return tuple(total * share // sum(shares) for share in shares)


# ---- ratios ----


def test_ratios_follow_speed_in_sixteenths() -> None:
    assert ratios([900e9, 300e9], "ab", "AB") == (16, 5)
    assert ratios([100.0, 10.0, 1.0], "abc", "ABC") == (16, 2, 0)
    assert ratios([7.0], "a", "A") == (16,)


def test_devices_of_a_class_get_equal_shares_despite_noise() -> None:
    assert ratios([500.0, 437.0, 511.0], "aaa", "ABC") == (16, 16, 16)
    assert ratios([500.0, 437.0, 250.0], "aab", "ABC") == (16, 16, 9)
    assert ratios([500.0, 437.0], "ab", "AB") == (16, 14)


def test_logical_devices_share_the_speed_of_their_physical_one() -> None:
    assert ratios([100.0, 100.0, 100.0], "aaa", "AAB") == (8, 8, 16)
    assert ratios([100.0, 100.0], "aa", "AA") == (16, 16)


@given(st.lists(st.floats(1e6, 1e13), min_size=1, max_size=8), st.floats(1e-3, 1e3))
def test_ratios_are_bounded_and_scale_free(speeds: list[float], factor: float) -> None:
    kinds = list(range(len(speeds)))
    shares = ratios(speeds, kinds, kinds)
    assert max(shares) == 16 and min(shares) >= 0
    assert all(abs(r - 16 * s / max(speeds)) <= 0.5 + 1e-9 for r, s in zip(shares, speeds, strict=True))
    # A power of two scales speeds exactly, so the shares must not change.
    assert ratios([2.0 * s for s in speeds], kinds, kinds) == shares


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(1, 1e3)), min_size=1, max_size=8))
def test_ratios_depend_on_class_not_on_noise_within_it(devices: list[tuple[str, float]]) -> None:
    classes, speeds = [c for c, _ in devices], [s for _, s in devices]
    shares = ratios(speeds, classes, range(len(devices)))
    for a, b in itertools.combinations(range(len(devices)), 2):
        assert classes[a] != classes[b] or shares[a] == shares[b]


# ---- memory ----


def test_fitted_lowers_only_overfull_devices() -> None:
    budgets = [Budget(1000, (0,)), Budget(1000, (1,))]
    assert fitted((16, 8), lambda s: shared_out(1200, s), budgets, "ab") == (16, 8)
    shares = fitted((16, 8), lambda s: shared_out(1800, s), budgets, "ab")
    assert shares == (10, 8) and not overfull(shared_out(1800, shares), budgets)


def test_fitted_keeps_equal_devices_equal_if_possible() -> None:
    budgets = [Budget(500, (0,)), Budget(700, (1,)), Budget(10**6, (2,))]
    shares = fitted((16, 16, 8), lambda s: shared_out(2000, s), budgets, "aab")
    assert shares[0] == shares[1] and not overfull(shared_out(2000, shares), budgets)
    alone = [Budget(300, (0,)), Budget(900, (1,))]
    shares = fitted((16, 16), lambda s: shared_out(1000, s), alone, "aa")
    assert shares[0] < shares[1] and not overfull(shared_out(1000, shares), alone)


def test_fitted_counts_logical_devices_together() -> None:
    budgets = [Budget(600, (0, 1)), Budget(600, (2,))]
    assert overfull([400, 400, 200], budgets) == {0, 1}
    shares = fitted((16, 16, 16), lambda s: shared_out(1000, s), budgets, "aab")
    assert shares[0] == shares[1] < shares[2] and not overfull(shared_out(1000, shares), budgets)


def test_fitted_returns_shares_unchanged_if_nothing_fits() -> None:
    budgets = [Budget(10, (0,)), Budget(10, (1,))]
    assert fitted((16, 9), lambda s: shared_out(1000, s), budgets, "ab") == (16, 9)


# ---- time ----


def test_times() -> None:
    cost = Cost((0, 0), (4_000_000, 1_000_000), (0, 500_000), (4096,) * 10 + (8192,))
    speeds = [Speed(1e9, 1e8), Speed(0.5e9, 1e8)]

    def reduce_s(nbytes: int) -> float:
        return nbytes * 1e-8

    apart = times(cost, speeds, "AB", reduce_s)
    assert apart.weights_ms == pytest.approx(4) and apart.host_ms == pytest.approx(5)
    assert apart.reduce_ms == pytest.approx((10 * 4096 + 8192) * 1e-5)
    assert apart.total_ms == pytest.approx(apart.weights_ms + apart.host_ms + apart.reduce_ms)
    assert times(cost, speeds, "AA", reduce_s).weights_ms == pytest.approx(6), "one device reads in turn"


def test_times_of_stages() -> None:
    read = 3_000_000, 4_000_000, 1_000_000
    cost = Cost((0,) * 3, read, (0,) * 3, (4096,), (4096,) * 8, ("0", "1", "1"))
    predicted = times(cost, [Speed(1e9, 1e9)] * 3, "ABC", lambda nbytes: 1e-3, lambda nbytes: 1e-4)
    assert predicted.weights_ms == pytest.approx(3 + 4) and predicted.reduce_ms == pytest.approx(1 + 0.8)
    predicted = times(cost, [Speed(1e9, 1e9)] * 3, "ABB", lambda nbytes: 0.0)
    assert predicted.weights_ms == pytest.approx(3 + 5), "one device reads in turn"


def test_subsets_are_the_fastest_devices_with_a_share() -> None:
    speeds = [Speed(s, 1.0) for s in (1.0, 3.0, 2.0, 9.0)]
    assert subsets((1, 1, 1, 0), speeds) == [(1,), (1, 2)]


# ---- over devices ----


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    return tmp_path / "speeds.json"


@pytest.fixture
def made_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[NumpyDevice]:
    """Return three devices with invented speeds and no measured tokens. An all-reduce takes 100 us per
    device."""
    invented = {"fast": 4e9, "half": 2e9, "slow": 1e8}
    monkeypatch.setattr(rates, "measure_speed", lambda d: Speed(invented[d.name], invented[d.name] / 10))
    monkeypatch.setattr(rates, "class_of", lambda d: d.name)
    monkeypatch.setattr(rates, "resource_of", lambda d: d.name)
    monkeypatch.setattr(rates, "measure_reduce", lambda ds, nbytes: 1e-4 * len(ds) * (len(ds) > 1))
    return [NumpyDevice(name) for name in invented]


def cost_of(total: int, n_reduces: int) -> Callable[[Shares], Cost]:
    def cost(shares: Shares) -> Cost:
        parts = shared_out(total, shares)
        n = n_reduces if sum(s > 0 for s in shares) > 1 else 0
        return Cost(parts, parts, (0,) * len(parts), (4096,) * n)

    return cost


def test_auto_split_of_a_large_model_uses_all(made_up: list[NumpyDevice]) -> None:
    prediction = auto_split(made_up[:2], cost_of(6_000_000_000, 64))
    assert prediction.tensor_split == (16, 8) and not prediction.fewer and prediction.n_reduces == 64
    assert prediction.times.weights_ms == pytest.approx(1000) and prediction.times.reduce_ms == pytest.approx(
        12.8
    )


def test_auto_split_says_when_fewer_would_be_faster(made_up: list[NumpyDevice]) -> None:
    prediction = auto_split(made_up, cost_of(4_000_000, 64))
    assert prediction.tensor_split == (16, 8, 0) and prediction.fewer == (0,)
    assert prediction.fewer_times == Times(1.0, 0.0, 0.0)
    text = "\n".join(prediction.lines(["fast", "half", "slow"]))
    assert "16,8,0" in text and "fewer devices would be faster: fast alone, 1 ms per token" in text


def test_fewer_devices_that_do_not_fit_are_not_proposed(made_up: list[NumpyDevice]) -> None:
    cost = cost_of(4_000_000, 64)
    prediction = auto_split(made_up[:2], cost, [Budget(3_000_000, (0,))])
    assert prediction.tensor_split == (16, 8) and not prediction.fewer


def test_predict_takes_any_shares(made_up: list[NumpyDevice]) -> None:
    prediction = predict(made_up[:2], (3, 1), cost_of(6_000_000_000, 64))
    assert prediction.times.weights_ms == pytest.approx(1125) and not prediction.fewer


def test_same_cache_same_split(cache: Path) -> None:
    devices = [NumpyDevice("a"), NumpyDevice("b")]
    first = auto_split(devices, cost_of(10_000_000, 4))
    assert first.tensor_split == (16, 16), "two of a kind"
    written = cache.read_bytes()
    again = auto_split(devices, cost_of(10_000_000, 4))
    assert again == first and isinstance(again, Prediction) and cache.read_bytes() == written


def test_given_speeds_replace_measured_ones(made_up: list[NumpyDevice]) -> None:
    """A given speed applies to each device, even if two devices are on one card. An exchange takes the given
    time plus the time to transfer its bytes."""
    cards = Rates(weights=1e9, host=1e8, exchange_s=1e-3)
    predicted = predict([made_up[0]] * 2, (1, 1), cost_of(6_000_000_000, 64), rates=cards)
    assert predicted.times.weights_ms == pytest.approx(3000)
    assert predicted.times.reduce_ms == pytest.approx(64 * (1 + 4096 / 1e5))
    assert predict(made_up[:1], (1,), cost_of(1_000_000, 64), rates=cards).times == Times(1.0, 0.0, 0.0)
    some = Rates(weights=1e9)
    assert some.speed(made_up[0]) == Speed(1e9, 4e8) and some.reduce(made_up, 4096) == pytest.approx(3e-4)
