"""Ranks shares of devices by the context that fits, from one layout that is sized exactly.

Other shares change which part of a layer's matrices and caches a device holds, and little else. So the plans
of one layer of each kind, and the bytes of the complete tensors, predict the memory of any shares in a
fraction of a millisecond. The best shares are then sized exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import comb, gcd

from vkbackend.buffer import Home
from vkbackend.errors import VkbackendError
from vkbackend.meta.balance import Shares
from vkbackend.meta.plan import Plan
from vkbackend.meta.policy import Attention, Layer, plan_model
from vkbackend.models.architectures.base import Model, all_weights
from vkbackend.models.fitting.sized_layout import STEP, SizedLayout
from vkbackend.models.placement.cache_plan import CachePlan
from vkbackend.models.placement.fit import Budget
from vkbackend.models.placement.layout import (
    layer_of,
    memory_specs,
    split_layers,
    with_caches_of,
)
from vkbackend.models.placement.memory_report import stored_nbytes
from vkbackend.models.placement.recurrent_state import StatePlan

MOVES = 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128  # shares of the model that the search moves between devices
WHOLE = 8, 16, 32, 64, 128  # the largest share, in whole numbers
FEW_EXPERTS = 16  # experts of a layer are planned; the others repeat their ranges
MOST_STARTS, BEST_STARTS = 400, 3

Part = tuple[int, str]  # A kind of layer (-1: the output) and a dimension of its plan.
Score = tuple[int, float]  # Context, and the negative time of reading the weights.


@dataclass(frozen=True, slots=True)
class _Bytes:
    """The bytes of a part on all devices together: its weights, and its caches at the shortest and the
    longest context."""

    weights: float = 0.0
    least: float = 0.0
    most: float = 0.0


class ShareScreen:
    """`sized` is a layout with any shares. Contexts are `least` to `most` tokens. `speeds` are the bytes per
    second at which devices read weights."""

    def __init__(
        self,
        model: Model,
        types: Mapping[str, str],
        sized: SizedLayout,
        budgets: Sequence[Budget],
        speeds: Sequence[float],
        least: int,
        most: int,
    ) -> None:
        self._model, self._options, self._n = model, sized.options, sized.layout.n_devices
        self._budgets, self._speeds, self._least, self._most = budgets, speeds, least, most
        every = split_layers(model, types, memory_specs(model, sized.options))
        self._kinds: list[Layer] = list(dict.fromkeys(every))
        self._kind_of = [self._kinds.index(layer) for layer in every]
        self._parts = self._bytes_of_parts(sized)
        shortest = sized.held(replace(sized.options, n_ctx=least))
        known = self._loads(sized.options.shares or (1.0,) * self._n)
        # Mirrored tensors, tables, scratch and staging do not depend on the shares.
        self._rest = [
            sum(budget.held(shortest).values())
            - sum(known[d].weights + known[d].least for d in budget.members)
            for budget in budgets
        ]
        self._scores: dict[Shares, Score] = {}

    def _bytes_of_parts(self, sized: SizedLayout) -> dict[Part, _Bytes]:
        dims = {spec.name: spec.role.dim for spec in all_weights(self._model)}
        weights: defaultdict[Part, float] = defaultdict(float)
        for load in sized.layout.loads:
            il, dim = layer_of(load.name), dims.get(load.name, "")
            if dim and load.home is Home.WEIGHTS:
                kind = -1 if il is None or dim == "vocab" else self._kind_of[il]
                weights[kind, dim] += stored_nbytes(load)
        caches = [self._caches(sized, n_ctx) for n_ctx in (self._least, self._most)]
        keys = [*weights, *caches[0]]
        return {key: _Bytes(weights[key], caches[0].get(key, 0), caches[1].get(key, 0)) for key in keys}

    def _caches(self, sized: SizedLayout, n_ctx: int) -> dict[Part, float]:
        """Return the bytes of the caches in device memory, on all devices together."""
        nbytes: defaultdict[Part, float] = defaultdict(float)
        layout = with_caches_of(sized.layout, replace(sized.options, n_ctx=n_ctx))
        for cache in layout.memories():
            if cache.home is Home.KV:
                nbytes[self._kind_of[cache.layer], cache.spec.dim] += _whole_nbytes(cache, self._n)
        return nbytes

    def _loads(self, shares: Shares) -> list[_Bytes]:
        """Return the bytes of each device. Raises PlanError."""
        plans, output = plan_model(
            [_with_few_experts(kind) for kind in self._kinds], self._model.n_vocab, self._n, shares
        )
        sums = [[0.0, 0.0, 0.0] for _ in range(self._n)]
        for (kind, dim), part in self._parts.items():
            for total, fraction in zip(
                sums, fractions(output if kind < 0 else plans[kind], dim), strict=True
            ):
                total[0] += fraction * part.weights
                total[1] += fraction * part.least
                total[2] += fraction * part.most
        return [_Bytes(*total) for total in sums]

    def score(self, shares: Shares) -> Score:
        if shares not in self._scores:
            try:
                self._scores[shares] = self._score(self._loads(shares))
            except VkbackendError:
                self._scores[shares] = -1, 0.0
        return self._scores[shares]

    def _score(self, loads: Sequence[_Bytes]) -> Score:
        n_ctx = float(self._most)
        for budget, rest in zip(self._budgets, self._rest, strict=True):
            of = [loads[d] for d in budget.members]
            room = budget.nbytes - rest - sum(load.weights + load.least for load in of)
            more = sum(load.most - load.least for load in of)
            if room < 0:
                n_ctx = min(n_ctx, self._least * (1 + room / budget.nbytes) - STEP)
            elif more > 0:
                n_ctx = min(n_ctx, self._least + (self._most - self._least) * room / more)
        seconds = max(load.weights / speed for load, speed in zip(loads, self._speeds, strict=True))
        return int(n_ctx), -seconds

    def best(self, starts: Sequence[Shares]) -> list[Shares]:
        """Return shares in whole numbers, the best first."""
        tried = sorted({*starts, *self._by_heads()}, key=self.score, reverse=True)
        ends = [self._climb(shares) for shares in (*starts, *tried[:BEST_STARTS])]
        return sorted(dict.fromkeys(map(self._in_whole_numbers, ends)), key=self.score, reverse=True)

    def _by_heads(self) -> Iterator[Shares]:
        """Yield shares for every division of the KV heads, because this dimension has the coarsest steps."""
        counts = [kind.attention.n_head_kv for kind in self._kinds if isinstance(kind.attention, Attention)]
        n_heads = max(counts, default=0)
        if not n_heads or comb(n_heads + self._n - 1, self._n - 1) > MOST_STARTS:
            return
        for bars in combinations(range(n_heads + self._n - 1), self._n - 1):
            ends = [-1, *bars, n_heads + self._n - 1]
            yield normal([b - a - 0.5 for a, b in pairwise(ends)])

    def _climb(self, shares: Shares) -> Shares:
        """Move parts of the model between devices while that is better."""
        best = normal(shares)
        for part in MOVES:
            improves = True
            while improves:
                improves = False
                for moved in self._moves(best, part):
                    if self.score(moved) > self.score(best):
                        best, improves = moved, True
        return best

    def _moves(self, shares: Shares, part: float) -> Iterator[Shares]:
        for a in range(self._n):
            for b in range(self._n):
                if a != b and (n := min(part, shares[a])) > 0:
                    changed = list(shares)
                    changed[a] -= n
                    changed[b] += n
                    yield normal(changed)

    def _in_whole_numbers(self, shares: Shares) -> Shares:
        """Return nearly equal shares that are short to print."""
        whole: Shares = shares
        for most in WHOLE:
            whole = short([most * share / max(shares) for share in shares])
            if self.score(whole)[0] >= 0.995 * self.score(shares)[0]:
                break
        return whole


def normal(shares: Sequence[float]) -> Shares:
    return tuple(round(share / sum(shares), 6) for share in shares)


def short(shares: Sequence[float]) -> Shares:
    """Round shares to whole numbers without a common factor."""
    counts = [round(share) for share in shares]
    return tuple(float(n // gcd(*counts)) for n in counts)


def fractions(plan: Plan, dim: str) -> list[float]:
    """Return the part of a dimension that each device holds."""
    tiles = plan.experts if dim == "experts" else (plan.ranges[dim],)
    size = sum(max(end for _, end in ranges) for ranges in tiles) or 1
    return [sum(ranges[d][1] - ranges[d][0] for ranges in tiles) / size for d in range(len(tiles[0]))]


def _with_few_experts(layer: Layer) -> Layer:
    ffn = layer.ffn
    if ffn is None or ffn.n_expert <= FEW_EXPERTS:
        return layer
    return replace(layer, ffn=replace(ffn, n_expert=FEW_EXPERTS))


def _whole_nbytes(cache: CachePlan | StatePlan, n_devices: int) -> float:
    if isinstance(cache, StatePlan):
        return sum(sum(cache.nbytes(d)) for d in range(n_devices))
    size = max(end for _, end in cache.heads)
    return sum(replace(cache, heads=((0, size),)).nbytes(0))
