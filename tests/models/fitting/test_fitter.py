"""On simulated cards, `--fit` keeps its order of preference, computes exact sizes, and respects given
values."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from fitting import N_CTX, Cards

from vkbackend.errors import InvalidArgument
from vkbackend.models.arguments import FITTED
from vkbackend.models.fitting.fitter import COMFORTABLE
from vkbackend.models.fitting.flags import flags
from vkbackend.models.options import Options
from vkbackend.models.placement.fit import shortfall
from vkbackend.tools import cli

pytestmark = pytest.mark.no_vulkan
MODEL = "llama-8b:Q4_K"
FIT = tuple(name for name in FITTED if name != "n_ubatch")  # the default value needs no flag


@cache
def of(gib: tuple[float, ...], **given: Any) -> Options:
    """Four layers take 0.8 GiB, and 131,072 tokens of F16 cache 2 GiB. A margin of 1 GiB stays free."""
    return Cards(MODEL, gib, 4).fit(**given)


def test_the_types_follow_the_memory() -> None:
    whole, large, small = (of((gib,)) for gib in (4, 2.6, 2.1))
    assert (whole.n_ctx, whole.type_k, whole.type_v) == (N_CTX, "f16", "f16")
    assert COMFORTABLE <= large.n_ctx < N_CTX and large.type_k == "f16"
    assert small.type_k == small.type_v == "q8_0" and 4096 <= small.n_ctx < N_CTX
    for gib, name in (1.86, "q5_1"), (1.852, "q5_0"), (1.85, "q4_0"):
        tiny = of((gib,))
        assert tiny.type_k == tiny.type_v == name and 4096 <= tiny.n_ctx < small.n_ctx
    assert not whole.fit and whole.n_gpu_layers is None


def test_layers_leave_the_devices_last() -> None:
    fit = of((1.8,))
    assert isinstance(fit.n_gpu_layers, int) and 0 < fit.n_gpu_layers < 5
    assert (fit.n_ctx, fit.type_k) == (4096, "f16")


def test_one_block_more_does_not_fit() -> None:
    cards, fit = Cards(MODEL, [1.8, 1.5], 4), of((1.8, 1.5))
    assert shortfall(cards.held(fit), cards.budgets()) is None
    assert shortfall(cards.held(replace(fit, n_ctx=fit.n_ctx + 256)), cards.budgets()) is not None
    first, second = fit.tensor_split or ()
    assert first > second


def test_given_values_stay() -> None:
    given: dict[str, Any] = {"type_k": "bf16", "n_ctx": 2000, "tensor_split": (5, 1), "n_gpu_layers": 3}
    fit = of((3, 3), **given)
    assert (fit.type_k, fit.type_v, fit.n_ctx) == ("bf16", "f16", 2000)
    assert fit.tensor_split == (5, 1) and fit.n_gpu_layers == 3
    fit = of((3,), n_slots=3, kv_cells=1500)
    assert (fit.n_ctx, fit.n_slots, fit.kv_cells) == (1500, 3, 1500)
    with pytest.raises(InvalidArgument, match="3 margins for 1 devices"):
        of((3,), fit_target="1,2,3")


def test_the_margin_is_left_free() -> None:
    margins = [of((2.6,), fit_target=mib, type_k="f16").n_ctx for mib in (512, 1024)]
    assert margins[0] > margins[1]


def test_slots_share_the_cells_that_are_left() -> None:
    fit, tight = of((5.0,), n_slots=4), of((2.6,), n_slots=4)
    assert fit.n_ctx == N_CTX and fit.kv_cells and N_CTX < fit.kv_cells < 4 * N_CTX
    assert tight.kv_cells == tight.n_ctx < N_CTX


def test_the_fastest_shares_win_where_all_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkbackend.models.fitting.fitter.by_speed", lambda devices, rates: (16.0, 4.0))
    assert of((5, 5), n_slots=1).tensor_split == (4, 1)
    tight = of((1.6, 3), n_slots=1)  # the fast card is too small for its share
    first, second = tight.tensor_split or ()
    assert first < second and tight.n_ctx > COMFORTABLE


def test_whole_layers_on_each_device() -> None:
    fit = of(
        (
            1.8,
            1.5,
            1.7,
        ),
        split_mode="layer",
    )
    assert sum(fit.tensor_split or ()) == 5 and fit.n_ctx > COMFORTABLE


def test_experts_move_to_host_memory_and_their_copies_return() -> None:
    fit = Cards("gpt-oss-120b:MXFP4", [4], 2).fit()
    assert fit.override_tensor and fit.n_ctx == N_CTX and fit.n_gpu_layers is None
    assert isinstance(fit.moe_cache_mib, float) and fit.moe_cache_mib > 0
    given = Cards("gpt-oss-120b:MXFP4", [4], 2).fit(override_tensor=fit.override_tensor)
    assert given == fit


@pytest.mark.parametrize(("gib", "n_slots"), [((5.0,), 4), ((1.8, 1.5), 1), ((1.8,), 4)])
def test_the_flags_set_the_same_options(gib: tuple[float, ...], n_slots: int) -> None:
    fit, asked = of(gib, n_slots=n_slots), Cards(MODEL, gib, 1).options(fit=FIT)
    asked = replace(asked, n_slots=n_slots)
    words = ["serve", "-dev", ",".join(fit.devices or ()), *flags(fit, asked).split()]
    words += ["-np", "1"] if n_slots == 1 else []
    args, _ = cli.parse(words)
    again = Options.of(MODEL, **{name: getattr(args, name) for name in (*FIT, "devices")})
    assert args.fit == ()
    assert all(getattr(again, name) == getattr(fit, name) for name in FIT)
