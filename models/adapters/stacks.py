"""Stacks the pairs of all adapters into two weights per adapted matrix.

For a matrix W [n_out, n_in] and n adapters of rank up to R, A is [n * R, n_in] and B [n_out, n * R]. For
experts, A is [n * n_expert, R, n_in] and B [n * n_expert, n_out, R]. Missing pairs are zeros, and pairs of a
smaller rank are padded with zeros. B contains the factor alpha / rank. A and B are split like W on the axis
that they share with W, so the update of a split product needs no additional exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vkbackend.errors import AdapterError, UnsupportedModel
from vkbackend.formats import narrowed, widened
from vkbackend.meta.ops.low_rank import STARTS, A, B, group_name
from vkbackend.meta.plan import MIRROR, Role
from vkbackend.models.adapters.adapter import Adapter, Pair
from vkbackend.models.architectures.weight_specs import WeightSpec

# Matrices of a layer that read the same input.
SAME_INPUT = (
    ("attn_q", "attn_k", "attn_v"),
    ("attn_q_a", "attn_kv_a_mqa"),
    ("ffn_gate", "ffn_up"),
    ("ffn_gate_shexp", "ffn_up_shexp"),
)
MAX_SHARED_NBYTES = 1 << 27  # the smallest limit of a storage binding that Vulkan allows
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
    halves: dict[str, tuple[Half, Half]] = {
        name: _stacked(by_name[name], of_adapters) for name, of_adapters in pairs.items()
    }
    n, added = len(adapters), [half.spec(name + B) for name, (_, half) in halves.items()]
    for names in _groups({name: a for name, (a, _) in halves.items()}):
        shared = [halves[name][0] for name in names]
        values = shared[0].values
        if len(shared) > 1:
            values = np.concatenate([a.values.reshape(n, -1, values.shape[1]) for a in shared], axis=1)
            values = values.reshape(-1, values.shape[2])
        types = set[str]().union(*(a.types for a in shared))
        added.append(Half(values, types, shared[0].role).spec(group_name(names) + A))
    widths = {spec.shape[0] // n for spec in added if spec.name.endswith(A) and len(spec.shape) == 2}
    return [*added, *(_starts(width, n) for width in sorted(widths))]


def _groups(halves: Mapping[str, Half]) -> Iterator[list[str]]:
    """Yield the names of weights that share an A. An A that is split or too large is not shared."""
    for name, half in halves.items():
        layer, _, matrix = name.removesuffix(".weight").rpartition(".")
        same = next((group for group in SAME_INPUT if matrix in group), (matrix,))
        names = [full for each in same if (full := f"{layer}.{each}.weight") in halves]
        shared = [halves[each] for each in names]
        fits = sum(a.values.nbytes for a in shared) <= MAX_SHARED_NBYTES
        alike = {(a.role, a.values.shape[1:]) for a in shared} == {(MIRROR, half.values.shape[-1:])}
        if len(names) < 2 or not (fits and alike):
            yield [name]
        elif name == names[0]:
            yield names


def _starts(width: int, n: int) -> WeightSpec:
    """Return the first row of each adapter in an A with `width` rows per adapter."""
    values = np.arange(n + 1, dtype=np.uint32) * np.uint32(width)
    return WeightSpec(f"{STARTS}{width}", values.shape, values=values, dtype="u32")


def _fitted(adapter: Adapter, specs: Sequence[WeightSpec], unread: Collection[str]) -> dict[str, Pair]:
    """Return the adapter's pairs by the name of the model's weight. A fused tensor's pair is split into
    parts."""
    stored: dict[str, list[WeightSpec]] = {}  # by the tensor's name in the file
    for spec in specs:
        stored.setdefault(spec.part.tensor if spec.part else spec.name, []).append(spec)
    for spec in specs:
        stored.setdefault(spec.name, [spec])
    for spec in specs:  # A tied lm_head's source has its own spec.
        if spec.source:
            stored.setdefault(spec.source, [spec])
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
    """Check the shapes of a pair, and return it. If `whole`, `pair` is for a complete fused tensor, and only
    the rows of `spec` are returned."""
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


def _stacked(spec: WeightSpec, pairs: Pairs) -> tuple[Half, Half]:
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
    return Half(a, types, a_role), Half(b, types, b_role)


class Half(NamedTuple):
    """A or B of all adapters, float32. `types` are the types in the files."""

    values: np.ndarray
    types: set[str]
    role: Role

    def spec(self, name: str) -> WeightSpec:
        """Store the values in the files' type if that is exact, else in f32."""
        dtype, raw = "f32", self.values.reshape(-1).view(np.uint8)
        if len(self.types) == 1:
            [dtype] = self.types
            with np.errstate(over="ignore"):
                raw = narrowed(raw, dtype)
            if not np.array_equal(widened(raw, dtype).view(np.float32), self.values.reshape(-1)):
                dtype, raw = "f32", self.values.reshape(-1).view(np.uint8)
        return WeightSpec(name, self.values.shape, self.role, values=raw, dtype=dtype)
