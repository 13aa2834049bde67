"""Matrix products and conversion of their operands."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vkbackend import ops as device_ops
from vkbackend.buffer import View, Virtual
from vkbackend.formats import row_nbytes
from vkbackend.meta import split
from vkbackend.meta.ops.low_rank import adapt
from vkbackend.meta.split import MIRRORED
from vkbackend.meta.sums import holders_of, whole
from vkbackend.meta.tensor import Tensor, TensorGraph, Weight
from vkbackend.recording import SUBMISSION_S

LONG_ROWS, W_TILE = 512, 128  # W_TILE is a multiple of every op's rows of w per workgroup.


def linear(x: Tensor, w: Weight, bias: Weight | None = None) -> Tensor:
    """Return y = x w^T + bias, where w is [n_out, n_in] and bias [n_out]."""
    x, graph = whole(x), x.graph
    name = w.name.rpartition(".")[0] or w.name
    state = split.linear(x.state, w.state)
    holders = holders_of(x) if state == MIRRORED else None
    y = graph.new(x.rows, w.shape[0], state, name.rpartition(".")[2], holders)
    biased: Sequence[int] = ()  # The devices that add the bias. If y is PARTIAL, only one device adds it.
    if bias:
        y.state = split.add_bias(y.state, bias.state)
        biased = y.state.writers[:1] or holders_of(y)
    for d, out in enumerate(y.views):
        if out is not None:
            matmul(graph, d, w, x, out, bias.whole(d) if bias and d in biased else None)
    adapt(x, w, y)
    return y


def matmul(graph: TensorGraph, d: int, w: Weight, x: Tensor, out: View, bias: View | None = None) -> None:
    on, width = graph.on(d, w), out.shape[-1]
    operand = operand_of(x, d, device_ops.operand_type(on.limits, x.rows, w.dtype))
    pieces = [
        part
        for first, piece in w.pieces[d]
        for part in _in_parts(first, piece, n_parts(graph, d, x.rows, 2 * x.rows * math.prod(piece.shape)))
    ]
    for first, piece in pieces:
        n_rows, n = out.shape[0], piece.shape[0]
        target = View(out.buffer, out.offset + 4 * first, ((n_rows - 1) * width + n,)) if n < width else out
        local_bias = bias and View(bias.buffer, bias.offset + 4 * first, (n,))
        on.mat(piece, operand, target, bias=local_bias, y_stride=width)


def n_parts(graph: TensorGraph, d: int, n_rows: int, flops: int) -> int:
    """Return how many dispatches compute a product with `n_rows` rows of x. No dispatch may take longer than
    a product with LONG_ROWS rows, or than SUBMISSION_S at the device's pace, because a driver's watchdog
    limits the time of a submission. Software devices have no watchdog. They use one dispatch, because gate
    and up are fused only if each is one dispatch."""
    if graph.devices[d].limits.is_cpu:
        return 1
    return max(-(-n_rows // LONG_ROWS), math.ceil(flops / (SUBMISSION_S * graph.pace(d).flops)))


def _in_parts(first: int, piece: View, n: int) -> list[tuple[int, View]]:
    """Divide a piece into equal parts of whole tiles, each of at most 1/n of the piece or one tile. Each row
    of w is still read once."""
    n_out = piece.shape[0]
    n_tiles = -(-n_out // W_TILE)
    n_equal = -(-n_tiles // max(1, n_tiles // n))
    size = -(-n_tiles // n_equal) * W_TILE
    return [(first + at, piece.rows(at, min(at + size, n_out))) for at in range(0, n_out, size)]


def operand_of(x: Tensor, d: int, dtype: str) -> View:
    """Return x on device d as `dtype`, converted once for all matrices."""
    if (d, dtype) not in x.converted:
        x.converted[d, dtype] = convert(x.graph, d, x.on(d), dtype)
    return x.converted[d, dtype]


def convert(graph: TensorGraph, d: int, x: View, dtype: str) -> View:
    if dtype == x.dtype:
        return x
    on = graph.on(d, f"as_{dtype}")
    y = View(Virtual(math.prod(x.shape[:-1]) * row_nbytes(dtype, x.shape[-1]), on.label), 0, x.shape, dtype)
    on.convert(x, y)
    return y
