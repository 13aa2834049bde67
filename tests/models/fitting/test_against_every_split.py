"""`--fit` reaches at least 95 % of the longest context of a search over all shares. The search computes the
allocations for each of these shares; `--fit` predicts the memory of most shares from one layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from device_sets import wide
from fitting import N_CTX, Cards

from vkbackend.buffer import Home
from vkbackend.meta.balance import Shares
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.models.placement.fit import ON_DEVICE, fits, sizes_with
from vkbackend.models.placement.layout import lay_out, layouts
from vkbackend.models.placement.traced_steps import fitting_steps
from vkbackend.tools.measure.simulated import Hollow

pytestmark = pytest.mark.no_vulkan
LEAST = 4096
LARGE = [  # model, GiB of each card, sum of the shares in the search
    ("llama-8b:Q4_K", [8], 1),
    ("llama-8b:Q4_K", [6, 3], 64),
    ("llama-8b:Q4_K", [6, 4, 3, 2], 16),
    ("llama-70b:Q4_K", [48], 1),
    ("llama-70b:Q4_K", [32, 16], 64),
    ("llama-70b:Q4_K", [24, 16, 8, 12], 16),
    ("gpt-oss-120b:MXFP4", [64], 1),
    ("gpt-oss-120b:MXFP4", [38, 26.5], 64),
    ("gpt-oss-120b:MXFP4", [24, 14, 18, 10], 12),
    ("gpt-oss-120b:MXFP4", [24], 1),
    ("qwen3.5-122b-a10b:Q4_K", [48, 32], 32),
]


def every_split(n: int, total: int) -> Iterator[Shares]:
    for bars in combinations(range(1, total), n - 1):
        yield tuple(float(b - a) for a, b in pairwise([0, *bars, total]))


def longest(cards: Cards, fit: Options, total: int) -> int:
    """Return the longest context for any shares whose sum is `total`. Cache types and placement are the same
    as in `fit`."""
    model, types, devices = cards.model, cards.types, cards.devices
    limits, n, budgets = [device.limits for device in devices], len(devices), cards.budgets()
    options = replace(fit, moe_cache_mib=0.0)
    halves, layout = n > 1, lay_out(model, types, n, options)
    _, steps = fitting_steps(model, layout, options, limits, options.n_ubatch, halves=halves)
    sizes, best = sizes_with(layouts(model, types, n), devices, steps), 0
    for shares in every_split(n, total):
        wanted = replace(options, tensor_split=shares)
        short, long = (sizes(replace(wanted, n_ctx=n_ctx)) for n_ctx in (LEAST, N_CTX))
        n_ctx = N_CTX
        for budget in budgets:  # The caches grow in proportion to the context.
            low, high = (sum(budget.held(held).values()) for held in (short, long))
            if low > budget.nbytes:
                n_ctx = 0
            elif high > budget.nbytes:
                most = LEAST + (N_CTX - LEAST) * (budget.nbytes - low) // (high - low)
                n_ctx = min(n_ctx, int(most))
        if n_ctx > best and fits(replace(wanted, n_ctx=n_ctx), sizes, budgets):
            best = n_ctx
    return best


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("spec", "gib", "total", "n_layer"),
    [
        ("llama-8b:Q4_K", [1.8, 1.4], 16, 4),
        *(wide(pytest.param(*case, None, id=f"{case[0]}-{case[1]}")) for case in LARGE),
    ],
)
def test_the_context_is_as_long_as_by_hand(
    spec: str, gib: list[float], total: int, n_layer: int | None
) -> None:
    cards = Cards(spec, gib, n_layer)
    fit = cards.fit()
    best = longest(cards, fit, total)
    assert 0.95 * best <= fit.n_ctx and fit.n_ctx >= LEAST, (fit.n_ctx, best, fit.tensor_split)
    assert fits(fit, cards.held, cards.budgets())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("spec", "gib", "n_layer"),
    [
        ("llama-8b:Q4_K", [1.8, 1.4], 4),
        *(wide(pytest.param(spec, gib, None, id=f"{spec}-{gib}")) for spec, gib, _ in LARGE if len(gib) > 1),
    ],
)
def test_it_starts_at_once(
    spec: str, gib: list[float], n_layer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is allocated on the cards equals the plan."""
    monkeypatch.setenv("VKBACKEND_CACHE", "off")  # The speed of simulated cards cannot be measured.
    cards = Cards(spec, gib, n_layer)
    fit = cards.fit()
    planned = [sum(held.homes[home] for home in ON_DEVICE) for held in cards.held(fit)]
    runner = Runner(fit, Hollow(spec, n_layer), devices=cards.devices)
    allocated = [sum(device.nbytes[Home(home)] for home in ON_DEVICE) for device in cards.devices]
    runner.close()
    assert allocated == planned
