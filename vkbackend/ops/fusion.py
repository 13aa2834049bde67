"""Fuses a dispatch with the only dispatch that reads its result. The result is then not written to memory.

A fusion rule examines a dispatch and the producers of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vkbackend.buffer import ALIGN, View, Virtual
from vkbackend.formats import block_of
from vkbackend.limits import Limits
from vkbackend.ops.elementwise import ACTS
from vkbackend.ops.kv_cache import HeadNorm, Rotation
from vkbackend.ops.recorder import Recorder
from vkbackend.ops.table import MATRIX_OPS, OPS
from vkbackend.recording import Command, Copy, Dispatch, Exchange, Recording


def fuse(recording: Recording, limits: Limits) -> Recording:
    """Fuse dispatches. The results do not change."""
    fusing = _Fusing(recording, limits)
    for at, command in enumerate(recording.commands):
        if isinstance(command, Dispatch):
            for rule in _RULES.get(command.op, ()):
                rule(fusing, at)
    return Recording(recording.name, [c for c in fusing.commands if c is not None])


class _Fusing:
    """`commands` has None for a command that was fused into another. `touched` has the indices of the
    commands that use each value."""

    def __init__(self, recording: Recording, limits: Limits) -> None:
        self.limits = limits
        self.commands: list[Command | None] = list(recording.commands)
        self.touched: dict[Any, set[int]] = {}
        self._segments: list[int] = []
        for at, command in enumerate(recording.commands):
            last = self._segments[-1] if self._segments else 0
            self._segments.append(last + isinstance(command, Exchange))
            if isinstance(command, Dispatch | Copy):
                for access in (*command.reads, *command.writes):
                    if isinstance(access.buffer, Virtual):
                        self.touched.setdefault(access.buffer, set()).add(at)

    def named(self, at: int) -> dict[str, Any]:
        """Return a dispatch's views, push constants and specialization constants by name."""
        d = self.commands[at]
        assert isinstance(d, Dispatch)
        views = dict(zip(OPS[d.op].arg_names, d.args, strict=True))
        return views | dict(d.push) | dict(d.consts) | {"op": d.op, "step": d.step, "label": d.label}

    def maker(self, at: int, name: str, ops: tuple[str, ...], others_later: bool = False) -> int | None:
        """Return the index of the dispatch that produces input `name` of dispatch `at`, or None if fusion is
        impossible. The producer's op must be in `ops`, and must have the same result if it runs at position
        `at`. Only dispatch `at` may use the value, or if `others_later`, also later commands."""
        value: View = self.named(at)[name]
        first, *others = sorted(self.touched.get(value.buffer, ())) or [at]
        producer = self.commands[first]
        alone = others[:1] == [at] and (others_later or len(others) == 1)
        if not alone or not isinstance(producer, Dispatch) or producer.op not in ops:
            return None
        if not any(
            (w.begin, w.end) == (value.offset, value.end) for w in producer.writes if w.buffer is value.buffer
        ):
            return None
        between = [c for c in self.commands[first + 1 : at] if isinstance(c, Dispatch | Copy)]
        moves = not any(w.overlaps(r) for c in between for w in c.writes for r in producer.reads)
        return first if moves and self._segments[first] == self._segments[at] else None

    def recorder(self, at: int) -> Recorder:
        return Recorder(Recording("fused"), self.limits, self.named(at)["label"])

    def replace(self, at: int, producers: list[int], fused: Recording) -> None:
        """Replace dispatch `at` by the dispatch in `fused`, and remove the dispatches `producers`."""
        [self.commands[at]] = fused.commands
        for i in producers:
            gone, self.commands[i] = self.commands[i], None
            assert isinstance(gone, Dispatch)
            for access in (*gone.reads, *gone.writes):
                if users := self.touched.get(access.buffer):
                    users.discard(i)
                    users.add(at)


def _norm_of(norm: dict[str, Any]) -> HeadNorm:
    return HeadNorm(norm["w"] if norm["HAS_W"] else None, norm["eps"])


def _norm_rope(f: _Fusing, at: int) -> None:
    r = f.named(at)
    if r["NORM"] or (i := f.maker(at, "x", ("rms_norm",))) is None:
        return
    norm = f.named(i)
    if norm["n"] != r["head_dim"]:
        return
    fused, x = f.recorder(at), norm["x"].reshape(*r["x"].shape)
    fused.rope(
        x, r["cos_sin"], r["y"], half_split=bool(r["HALF_SPLIT"]), norm=_norm_of(norm), parts=r["PARTS"]
    )
    f.replace(at, [i], fused.recording)


def _rope_store(f: _Fusing, at: int) -> None:
    s = f.named(at)
    if s["NORM"] or s["n_rot"] or block_of(s["cache"].dtype)[0] > 1:
        return
    if (i := f.maker(at, "x", ("rope", "rms_norm"))) is None:
        return
    m, fused = f.named(i), f.recorder(at)
    store = m["x"], s["cells"], s["cache"], s["step"]
    cell: dict[str, Any] = {"block": s["block_size"], "first": s["first_cell"]}
    if m["op"] == "rope" and m["PARTS"] > 1:
        return
    if m["op"] == "rope":
        norm = HeadNorm(m["w"] if m["NORM"] == 2 else None, m["eps"]) if m["NORM"] else None
        rotation = Rotation(m["cos_sin"], bool(m["HALF_SPLIT"]))
        fused.kv_store(*store, head_dim=m["head_dim"], norm=norm, rotation=rotation, **cell)
    else:
        fused.kv_store(*store, head_dim=m["n"], norm=_norm_of(m), **cell)
    f.replace(at, [i], fused.recording)


def _gated_product(f: _Fusing, at: int) -> None:
    """Fuse a glu with the two products that produce its inputs. Both products must read the same x, and one
    storage binding must span both matrices."""
    g = f.named(at)
    i, j = (f.maker(at, name, _PRODUCTS) for name in ("gate", "up"))
    if i is None or j is None:
        return
    gate, up = f.named(i), f.named(j)
    w, v = gate["w"], up["w"]
    same = all(gate[name] == up[name] for name in ("op", "x", "k", "n", "y_stride"))
    plain = not any(c["has_bias"] or c["act"] or c["y_stride"] != c["n"] for c in (gate, up))
    if not (same and plain and w.buffer is v.buffer and (w.shape, w.dtype) == (v.shape, v.dtype)):
        return
    # A binding begins at an aligned offset, at most ALIGN bytes before w.
    if not 0 < v.offset - w.offset or v.end - w.offset > f.limits.max_storage_range - ALIGN:
        return
    op = MATRIX_OPS[gate["op"]]
    if not (op.gates and op.gates(f.limits)):
        return
    fused = f.recorder(at)
    op(fused, w, gate["x"], g["y"], up=v, act=ACTS[g["ACT"]])
    f.replace(at, [i, j], fused.recording)


def _norm_of_sum(f: _Fusing, at: int) -> None:
    """Replace an add and the rms_norm of its sum by an add_partials with one partial sum. Later commands may
    also read the sum."""
    n = f.named(at)
    i = f.maker(at, "x", ("add",), others_later=True) if n["HAS_W"] else None
    if i is None:
        return
    s, shape, fused = f.named(i), (n["n_rows"], n["n"]), f.recorder(at)
    base, part, h = s["a"].reshape(*shape), s["b"].reshape(n["n"] * n["n_rows"]), n["x"].reshape(*shape)
    fused.add_partials(
        base,
        None,
        part,
        n["w"],
        h,
        n["y"],
        own_index=None,
        writers=1,
        eps=n["eps"],
        slot_stride=part.shape[0],
    )
    f.replace(at, [i], fused.recording)


def _quantized_norm(f: _Fusing, at: int) -> None:
    """Fuse quantize_q8 into the norm that produces its input. The fused dispatch is at the norm's position,
    because commands between the two may read the norm's residual."""
    if (i := f.maker(at, "x", ("rms_norm", "add_partials"))) is None:
        return
    norm, q = f.commands[i], f.named(at)
    assert isinstance(norm, Dispatch)
    if norm.args[-1].shape[-1] != q["k"]:
        return
    fused = Recording("fused", [replace(norm, variant="q8", args=(*norm.args[:-1], q["y"]))])
    f.replace(i, [at], fused)


_PRODUCTS = tuple(op.name for op in MATRIX_OPS.values() if op.gates)
_RULES: dict[str, tuple[Callable[[_Fusing, int], None], ...]] = {
    "rms_norm": (_norm_of_sum,),
    "rope": (_norm_rope,),
    "kv_store": (_rope_store,),
    "glu": (_gated_product,),
    "quantize_q8": (_quantized_norm,),
}
