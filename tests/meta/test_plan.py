"""A plan divides every dimension into ranges without gaps or overlaps. These ranges determine the slices of
each weight."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkbackend.errors import InvalidArgument, PlanError
from vkbackend.meta.plan import MIRROR, Dim, Plan, columns, normalise, rows, share_out, table
from vkbackend.meta.split import MIRRORED, check_tiling, scaled, split

pytestmark = pytest.mark.no_vulkan


SHARES = st.lists(st.floats(0, 1e6) | st.just(0.0), min_size=1, max_size=5).filter(any)


@given(SHARES)
def test_normalised_shares_sum_to_one(shares: list[float]) -> None:
    got = normalise(shares, len(shares))
    assert math.isclose(sum(got), 1) and all(0 <= s <= 1 for s in got)
    assert all(not s for s, given in zip(got, shares, strict=True) if not given)


def test_even_by_default_and_without_overflow() -> None:
    assert normalise(None, 4) == (0.25,) * 4
    assert normalise([1e308, 1e308, 1e308, 1e308], 4) == (0.25,) * 4
    assert normalise([3, 1], 2) == (0.75, 0.25)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([1, 1, 1], "3 shares for 2 devices"),
        ([1], "1 shares for 2 devices"),
        ([], "0 shares for 2 devices"),
        ([1, -0.5], "not negative"),
        ([1, math.nan], "finite"),
        ([1, math.inf], "finite"),
        ([0, 0], "above zero"),
        ([0.0, -0.0], "above zero"),
        (["a", 1], "not a list of numbers"),
        ([None, 1], "not a list of numbers"),
        (7, "not a list of numbers"),
    ],
)
def test_bad_shares(shares: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        normalise(shares, 2)


@given(SHARES, st.integers(1, 5000), st.integers(1, 64), st.integers(0, 9))
def test_ranges_tile_in_grains_near_the_exact_share(
    shares: list[float], size: int, grain: int, rotation: int
) -> None:
    dim = Dim(max(size, grain), grain)
    exact = normalise(shares, len(shares))
    ranges = share_out(dim, exact, rotation)
    assert len(ranges) == len(shares)
    check_tiling(ranges, dim.size, "test")
    grains, rest = divmod(dim.size, grain)
    filled = [d for d, (begin, end) in enumerate(ranges) if end > begin]
    for d, (begin, end) in enumerate(ranges):
        assert begin % grain == 0 or begin == dim.size
        assert shares[d] > 0 or begin == end, "a zero share got something"
        counted = (end - begin - (rest if d == filled[-1] else 0)) / grain
        assert counted == int(counted) and abs(counted - exact[d] * grains) < 1 + 1e-6


@given(SHARES, st.integers(1, 300), st.integers(0, 9))
def test_a_larger_share_never_gets_less(shares: list[float], size: int, rotation: int) -> None:
    exact = normalise(shares, len(shares))
    sizes = [end - begin for begin, end in share_out(Dim(size), exact, rotation)]
    for a, x in zip(sizes, exact, strict=True):
        for b, y in zip(sizes, exact, strict=True):
            assert x < y + 1e-9 or a + 1 >= b or a >= b


def test_ties_rotate_by_layer() -> None:
    sizes = [[e - b for b, e in share_out(Dim(5), normalise(None, 3), il)] for il in range(6)]
    assert sizes[:3] == [[2, 2, 1], [1, 2, 2], [2, 1, 2]] and sizes[3:] == sizes[:3]
    assert [sum(per_layer) for per_layer in zip(*sizes[:3], strict=True)] == [5, 5, 5]


def test_an_incomplete_grain_goes_to_the_last_device_with_a_range() -> None:
    assert share_out(Dim(70, 32), (0.5, 0.5, 0.0)) == ((0, 32), (32, 70), (70, 70))
    assert share_out(Dim(33, 32), (0.1, 0.9)) == ((0, 0), (0, 33))


def test_a_dimension_without_a_grain() -> None:
    with pytest.raises(PlanError, match="31 units is smaller than a grain of 32"):
        share_out(Dim(31, 32), (0.5, 0.5))


def plan_of_layer(rotation: int = 0) -> Plan:
    dims = {"kv_heads": Dim(3), "ffn": Dim(96, 32)}
    ranges = {name: share_out(dim, normalise([2, 1], 2), rotation) for name, dim in dims.items()}
    return Plan(ranges | {"heads": scaled(ranges["kv_heads"], 4)})


def test_all_states_of_a_layer_follow_its_plan() -> None:
    plan = plan_of_layer()
    assert plan.ranges == {
        "kv_heads": ((0, 2), (2, 3)), "ffn": ((0, 64), (64, 96)), "heads": ((0, 8), (8, 12)),
    }  # fmt: skip
    assert plan.state(MIRROR, (7, 5), "norm") == MIRRORED
    assert plan.state(rows("heads"), (12 * 16, 64), "q") == split(0, ((0, 128), (128, 192)))
    assert plan.state(columns("ffn"), (64, 96), "down") == split(1, ((0, 64), (64, 96)))
    with pytest.raises(PlanError, match=r"blk\.0\.q: axis 0 of \(13, 64\) is not a multiple of 12 heads"):
        plan.state(rows("heads"), (13, 64), "blk.0.q")


def test_the_plan_prints_runs_of_equal_layers() -> None:
    plans = [plan_of_layer(0), plan_of_layer(0), Plan({"ffn": share_out(Dim(96, 32), (1.0, 0.0))})]
    assert table(plans, ["blk.0", "blk.1", "blk.2"], 2).splitlines() == [
        "blk.0..blk.1: kv_heads 0:2; ffn 0:64; heads 0:8 | kv_heads 2:3; ffn 64:96; heads 8:12",
        "blk.2: ffn 0:96 | ffn 96:96",
    ]
