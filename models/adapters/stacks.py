"""Stacks the pairs of all adapters into two weights per adapted matrix.

For a matrix W [n_out, n_in] and n adapters of rank up to R, A is [n * R, n_in] and B [n_out, n * R]. For
experts, A is [n * n_expert, R, n_in] and B [n * n_expert, n_out, R]. Missing pairs and smaller ranks are
zeros. B contains the factor alpha / rank. A and B are split like W on the axis that they share with W, so the
update of a split product needs no additional exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from vkbackend.errors import AdapterError, UnsupportedModel
from vkbackend.formats import narrowed, widened
from vkbackend.meta.plan import MIRROR, Role
from vkbackend.models.adapters.adapter import Adapter, Pair
from vkbackend.models.architectures.weight_specs import WeightSpec

A, B, STARTS = ".lora_a", ".lora_b", "lora_starts."
Pairs = list[Pair | None]  # one per adapter


def low_rank_specs(
    adapters: Sequence[Adapter], specs: Sequence[WeightSpec], unread: Collection[str] = ()
) -> list[WeightSpec]:
    """Return the weights that the adapters add to a model of `specs`. Pairs of the file's `unread` tensors,
    which no step uses, are omitted. Raises AdapterError for a tensor that the model lacks or whose shape
    differs, and UnsupportedModel for a tensor that cannot be adapted."""
    by_name = {spec.name: spec for spec in specs}
    pairs: dict[str, Pairs] = {}
    for i, adapter in enumerate(adapters):
        for name, pair in _fitted(adapter, specs, unread).items():
            pairs.setdefault(name, [None] * len(adapters))[i] = pair
    added: list[WeightSpec] = []
    for name, of_adapters in pairs.items():
        added += _stacked(by_name[name], of_adapters)
    ranks = {
        spec.shape[0] // len(adapters) for spec in added if spec.name.endswith(A) and len(spec.shape) == 2
    }
    return [*added, *(_starts(rank, len(adapters)) for rank in sorted(ranks))]


def _starts(rank: int, n: int) -> WeightSpec:
    """Return the first row of each adapter in an A of this rank."""
    values = np.arange(n + 1, dtype=np.uint32) * np.uint32(rank)
    return WeightSpec(f"{STARTS}{rank}", values.shape, values=values, dtype="u32")


def _fitted(adapter: Adapter, specs: Sequence[WeightSpec], unread: Collection[str]) -> dict[str, Pair]:
    """Return the adapter's pairs by the name of the model's weight. A fused tensor's pair is split into
    parts."""
    stored: dict[str, list[WeightSpec]] = {}  # by the name in the file
    for spec in specs:
        stored.setdefault(spec.part.tensor if spec.part else spec.name, []).append(spec)
    for spec in specs:
        stored.setdefault(spec.name, [spec])
    fitted: dict[str, Pair] = {}
    for name, pair in adapter.pairs.items():
        if name in unread and name not in stored:
            continue
        if name not in stored:
            raise AdapterError(
                f"{adapter.path}: the model has no tensor {name!r}; is it the adapter of another base model?"
            )
        for spec in stored[name]:
            if spec.name in fitted:
                raise AdapterError(f"{adapter.path}: two pairs change {spec.name}; the file is damaged")
            whole = spec.part is not None and spec.part.tensor == name
            fitted[spec.name] = _checked(adapter.path, spec, pair, whole=whole)
    return fitted


def _checked(path: str, spec: WeightSpec, pair: Pair, *, whole: bool) -> Pair:
    """Return the pair of `spec`. If `whole`, B contains the rows of the complete fused tensor."""
    if len(spec.shape) < 2 or spec.host or spec.stacked or spec.values is not None:
        raise UnsupportedModel(
            f"{path}: {spec.name} is not a matrix product of the model, and its pair would be ignored; "
            "adapters of embeddings and norms are not supported"
        )
    *stack, n_out, n_in = spec.shape
    if whole and spec.part:
        n_out = n_out * spec.part.total // (spec.part.end - spec.part.begin)
    want = (*stack, pair.rank, n_in), (*stack, n_out, pair.rank)
    if (pair.a.shape, pair.b.shape) != want:
        raise AdapterError(
            f"{path}: {spec.name}: A has shape {pair.a.shape} and B {pair.b.shape}, and the model needs "
            f"{want[0]} and {want[1]}; is it the adapter of another base model?"
        )
    if not whole or not spec.part:
        return pair
    rows = spec.part.cut(np.ascontiguousarray(pair.b)).reshape(*spec.shape[:-1], pair.rank)
    return replace(pair, b=np.ascontiguousarray(rows))


def _stacked(spec: WeightSpec, pairs: Pairs) -> Iterator[WeightSpec]:
    n, rank = len(pairs), max(pair.rank for pair in pairs if pair)
    *stack, n_out, n_in = spec.shape
    n_expert = stack[0] if stack else 1
    a: np.ndarray = np.zeros((n, n_expert, rank, n_in), np.float32)
    b: np.ndarray = np.zeros((n, n_expert, n_out, rank), np.float32)
    for i, pair in enumerate(pairs):
        if pair:
            a[i, :, : pair.rank] = pair.a
            b[i, ..., : pair.rank] = np.float32(pair.factor) * pair.b
    types = {pair.dtype for pair in pairs if pair}
    role = spec.role
    if stack:
        a, b = a.reshape(n * n_expert, rank, n_in), b.reshape(n * n_expert, n_out, rank)
        a_role, b_role = (MIRROR, role) if role.axis == 1 else (role, MIRROR)
    else:
        a = a.reshape(n * rank, n_in)
        b = np.ascontiguousarray(b[:, 0].swapaxes(0, 1)).reshape(n_out, n * rank)
        a_role, b_role = (MIRROR, role) if role.axis == 0 else (role, MIRROR)
    yield _spec(spec.name + A, a, types, a_role)
    yield _spec(spec.name + B, b, types, b_role)


def _spec(name: str, values: np.ndarray, types: set[str], role: Role) -> WeightSpec:
    """Store the values in the file's type if this is exact, else in f32."""
    dtype, raw = "f32", values.reshape(-1).view(np.uint8)
    if len(types) == 1:
        [dtype] = types
        with np.errstate(over="ignore"):
            raw = narrowed(raw, dtype)
        if not np.array_equal(widened(raw, dtype).view(np.float32), values.reshape(-1)):
            dtype, raw = "f32", values.reshape(-1).view(np.uint8)
    return WeightSpec(name, values.shape, role, values=raw, dtype=dtype)
