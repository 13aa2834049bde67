"""RoPE tables equal closed forms, the limits of the scalings, and YaRN in scalar arithmetic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from vkbackend.errors import InvalidArgument
from vkbackend.rope import RopeTable

pytestmark = pytest.mark.no_vulkan


def angles(table: RopeTable, position: int) -> np.ndarray:
    row = table.rows([position])[0].astype(np.float64)
    return np.arctan2(row[:, 1], row[:, 0])


def test_shape_type_and_closed_form() -> None:
    table = RopeTable(8, freq_base=500.0)
    rows = table.rows([0, 1, 7, 100_000])
    assert rows.shape == (4, 4, 2) and rows.dtype == np.float32
    for r, position in enumerate((0, 1, 7, 100_000)):
        for i in range(4):
            theta = position * 500.0 ** (-2 * i / 8)
            assert rows[r, i, 0] == pytest.approx(math.cos(theta), abs=1e-7)
            assert rows[r, i, 1] == pytest.approx(math.sin(theta), abs=1e-7)
    np.testing.assert_array_equal(rows[0], np.stack([np.ones(4), np.zeros(4)], axis=-1))


def test_frequency_factors_divide() -> None:
    factors = [1.0, 2.0, 8.0]
    plain, divided = RopeTable(6), RopeTable(6, freq_factors=factors)
    np.testing.assert_allclose(divided.frequencies, plain.frequencies / factors, rtol=1e-15)
    np.testing.assert_allclose(divided.rows([8])[0, 2], plain.rows([1])[0, 2], rtol=1e-7)


def test_linear_scaling_is_a_position_divided() -> None:
    scaled, plain = RopeTable(16, scaling="linear", factor=4.0), RopeTable(16)
    np.testing.assert_allclose(scaled.rows([4, 40, 4000]), plain.rows([1, 10, 1000]), atol=1e-7)


def yarn_by_scalars(i: int, n_rot: int, base: float, factor: float, ctx: int) -> float:
    """Return pair i's rotation per position in radians, with the YaRN paper's ramp between 32 turns and 1
    turn."""
    theta = 1.0 / base ** (2 * i / n_rot)

    def dim(rotations: float) -> float:
        return n_rot * math.log(ctx / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(dim(32))), min(n_rot - 1, math.ceil(dim(1)))
    ramp = min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
    return theta / factor * ramp + theta * (1 - ramp)


@pytest.mark.parametrize(("n_rot", "base", "factor", "ctx"), [(64, 1e4, 4.0, 4096), (128, 1e6, 4.0, 32768)])
def test_yarn(n_rot: int, base: float, factor: float, ctx: int) -> None:
    table = RopeTable(n_rot, base, scaling="yarn", factor=factor, orig_ctx=ctx)
    want = np.array([yarn_by_scalars(i, n_rot, base, factor, ctx) for i in range(n_rot // 2)])
    np.testing.assert_allclose(table.frequencies, want, rtol=1e-13)
    plain = RopeTable(n_rot, base).frequencies
    assert table.frequencies[0] == plain[0]
    assert table.frequencies[-1] == pytest.approx(plain[-1] / factor, rel=1e-13)
    assert 0 < np.sum((table.frequencies < plain * 0.999) & (table.frequencies > plain / factor * 1.001))
    length = np.hypot(*np.moveaxis(table.rows([3, 900]).astype(np.float64), -1, 0))
    np.testing.assert_allclose(length, 1 + 0.1 * math.log(factor), rtol=1e-6)
    np.testing.assert_allclose(angles(table, 1), want, rtol=1e-5)


def test_yarn_with_factor_one_and_without_extrapolation() -> None:
    plain = RopeTable(32)
    same = RopeTable(32, scaling="yarn", factor=1.0, orig_ctx=512)
    np.testing.assert_allclose(same.rows([5, 77]), plain.rows([5, 77]), atol=1e-7)
    linear = RopeTable(32, scaling="linear", factor=2.0)
    none = RopeTable(32, scaling="yarn", factor=2.0, orig_ctx=512, ext_factor=0.0)
    np.testing.assert_array_equal(none.rows([5, 77]), linear.rows([5, 77]))


def test_attn_factor_multiplies() -> None:
    np.testing.assert_allclose(
        RopeTable(8, attn_factor=1.25).rows([9]), 1.25 * RopeTable(8).rows([9]), rtol=1e-6
    )
    yarn: dict[str, Any] = {"scaling": "yarn", "factor": 8.0, "orig_ctx": 1024}
    both = RopeTable(8, attn_factor=0.5, **yarn)
    np.testing.assert_allclose(both.rows([9]), 0.5 * RopeTable(8, **yarn).rows([9]), rtol=1e-6)


def test_temperature_grows_in_steps() -> None:
    plain, warm = RopeTable(8), RopeTable(8, temperature=0.5, temperature_length=10)
    factors = 1 + 0.5 * np.log([1, 1, 2, 2, 3])
    positions = [0, 9, 10, 19, 20]
    want = plain.rows(positions) * factors[:, None, None]
    np.testing.assert_allclose(warm.rows(positions), want, rtol=1e-6)


@pytest.mark.parametrize(
    ("sections", "interleaved", "still"),
    [
        ((11, 11, 10, 0), True, []),
        ((16, 8, 8, 0), False, []),
        ((8, 8, 8, 8), False, range(24, 32)),
        ((12, 10, 10, 0), True, []),
        ((20, 4, 4, 4), True, []),
        ((4, 2, 2, 0), False, []),
    ],
)
def test_sections_of_a_text(sections: tuple[int, ...], interleaved: bool, still: Any) -> None:
    plain, cut = RopeTable(64), RopeTable(64, sections=sections, interleaved=interleaved)
    rotated = np.ones(32, bool)
    rotated[list(still)] = False
    np.testing.assert_array_equal(cut.frequencies, plain.frequencies * rotated)
    assert (cut.rows([5])[0, ~rotated] == [1, 0]).all()


def test_interleaved_sections_of_an_image() -> None:
    """Qwen3-VL has the sections 24, 20 and 20 of 64 pairs. Among pairs 1 to 59, some rotate by height and
    some by width; all other pairs rotate by time."""
    table = RopeTable(128, sections=(24, 20, 20, 0), interleaved=True)
    at = np.array([3, 50, 700])
    component = [pair % 3 if pair < 60 else 0 for pair in range(64)]
    of_pair = [table.rows([at[c]])[0, pair] for pair, c in enumerate(component)]
    np.testing.assert_array_equal(table.rows(at[None])[0], of_pair)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sections": (1, 2, 1)}, "four counts"),
        ({"sections": (0, 0, 0, 0)}, "not all 0"),
        ({"sections": (0, (1 << 64) - 1, 1, 5)}, "add up to"),
        ({"n_rot": 7}, "even"),
        ({"n_rot": 0}, "even"),
        ({"freq_base": 0.0}, "positive"),
        ({"freq_base": math.nan}, "positive"),
        ({"scaling": "longer"}, "longer"),
        ({"scaling": "linear", "factor": 0.0}, "factor"),
        ({"scaling": "yarn", "factor": math.inf, "orig_ctx": 10}, "factor"),
        ({"scaling": "yarn", "factor": 2.0}, "context"),
        ({"freq_factors": [1.0]}, "4 finite"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 0.1, "temperature_length": 0}, "temperature"),
        ({"freq_factors": [1.0, 0.0, 1.0, 1.0]}, "non-zero"),
    ],
)
def test_bad_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        RopeTable(**{"n_rot": 8, **fields})


@pytest.mark.parametrize(
    "table",
    [
        RopeTable(8),
        RopeTable(12, 500_000.0, freq_factors=np.linspace(1, 8, 6)),
        RopeTable(16, scaling="yarn", factor=4.0, orig_ctx=64, attn_factor=1.5),
    ],
    ids=["plain", "factors", "yarn"],
)
def test_a_rotation_moves_a_row_to_another_position(table: RopeTable) -> None:
    """The rotation does not scale, because the row is already scaled. F32 rounds cos and sin by 2^-25."""
    old, want = (table.rows([p]).astype(np.float64)[0] @ [1, 1j] for p in (900, 853))
    rotation = table.rotation(-47).astype(np.float64) @ [1, 1j]
    np.testing.assert_allclose(old * rotation, want, atol=3e-7)
