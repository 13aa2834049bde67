"""Ops that look up token ids, and compute logits or the best tokens."""

from __future__ import annotations

from dataclasses import replace

from vkbackend import ops as device_ops
from vkbackend.buffer import View
from vkbackend.meta import split
from vkbackend.meta.candidates import places
from vkbackend.meta.ops.low_rank import adapt_logits
from vkbackend.meta.ops.matrix import matmul
from vkbackend.meta.split import MIRRORED
from vkbackend.meta.sums import holders_of, whole
from vkbackend.meta.tensor import Tensor, TensorGraph, Weight


def embed(graph: TensorGraph, table: Weight, ids: int = device_ops.TOKENS) -> Tensor:
    """Return the rows of `table` [n_vocab, n_embd] for the step's tokens, on every device. `ids` may select
    positions or types instead of tokens."""
    y = graph.new(graph.kind.n_rows, table.shape[1], MIRRORED, "embed")
    for d, inputs in enumerate(graph.inputs):
        for first, view in table.pieces[d]:
            graph.on(d, "embed").embed(view, y.on(d), inputs.step, ids=ids, first=first)
    return y


def embed_ngrams(tokens: Tensor, hashes: Weight, table: Weight, n_heads: int, end: int) -> Tensor:
    """Return [rows, n_heads * width]: for each row, the rows of `table` [n, width] to which `hashes` maps the
    n-grams that end at this row. A row of `tokens` contains the row's token and earlier tokens, minus the
    end-of-text token `end` (vkbackend/ops/streams.py)."""
    graph, width, holders = tokens.graph, table.shape[1], holders_of(tokens)
    ids = graph.new(tokens.rows, n_heads, MIRRORED, "ngram_ids", holders)
    y = graph.new(tokens.rows, n_heads * width, MIRRORED, "ngrams", holders)
    for d in holders:
        named = replace(ids.on(d), dtype="u32")
        graph.on(d, "ngrams").ngram_ids(tokens.on(d), hashes.whole(d), named, end=end)
        chosen = named.reshape(tokens.rows * n_heads, 1)
        out = y.on(d).reshape(tokens.rows * n_heads, width)
        for first, view in table.pieces[d]:
            graph.on(d, "ngrams").embed(view, out, graph.inputs[d].step, first=first, chosen=chosen)
    return y


def with_images(h: Tensor) -> Tensor:
    """In rows of images, replace the embeddings h [n_rows, n_embd] by the images' rows."""
    graph = h.graph
    for d, inputs in enumerate(graph.inputs):
        table = inputs.images[0].rows(1, 1 + h.rows)
        graph.on(d, "images").embed(table, h.on(d), inputs.step, ids=device_ops.TYPES, first=1)
    return h


def image_rows(graph: TensorGraph, table: int) -> Tensor:
    """Return the rows of images, [n_rows, n_embd], from a table of `Inputs.images`. The rows of tokens are
    zero."""
    holders, (_, width) = graph.readers(), graph.inputs[0].images[table].shape
    y = graph.new(graph.kind.n_rows, width, MIRRORED, "images", holders)
    for d in holders:
        inputs = graph.inputs[d]
        view = inputs.images[table].rows(0, 1 + y.rows)
        graph.on(d, "images").embed(view, y.on(d), inputs.step, ids=device_ops.TYPES)
    return y


def outputs(x: Tensor) -> Tensor:
    """Return the output rows of x, [n_outputs, width]."""
    x, graph = whole(x), x.graph
    y = graph.new(graph.kind.n_outputs, x.width, split.rows_op("outputs", x.state), "outputs", holders_of(x))
    for d in holders_of(y):
        step = graph.inputs[d].step
        graph.on(d, "outputs").embed(x.on(d), y.on(d), step, ids=device_ops.OUTPUTS)
    return y


def hidden_states(x: Tensor, first: int = 0) -> None:
    """Write x [rows, n_embd] as output rows from row `first` on, to the host-visible region of one device."""
    x, graph = whole(x), x.graph
    for d, inputs in enumerate(graph.inputs):
        if inputs.hidden is not None:
            graph.on(d, "hidden").copy(x.on(d), inputs.hidden.rows(first, first + x.rows))


def logits(x: Tensor, w: Weight, softcap: float = 0.0, bias: Weight | None = None) -> None:
    """Write x w^T + bias to the host-visible region. Each device writes the logits of its rows of w. If
    `top_k` is set, write only each row's best candidates."""
    x, graph = whole(x), x.graph
    split.linear(x.state, w.state)
    n_outputs, top_k = graph.kind.n_outputs, graph.kind.wanted.top_k
    for d, inputs in enumerate(graph.inputs):
        if inputs.logits is None or not w.pieces[d]:
            continue
        shape = n_outputs, sum(view.shape[0] for _, view in w.pieces[d])
        out = (
            graph.scratch(shape, "capped")
            if top_k
            else View(inputs.logits.buffer, inputs.logits.offset, shape)
        )
        adapts = graph.kind.adapters > 0 and w.low_rank is not None
        # If an op follows, the product is in scratch memory, so that the op does not read host-visible
        # memory.
        product = graph.scratch(shape, "logits") if softcap or (adapts and not top_k) else out
        matmul(graph, d, w, x, product, bias.whole(d) if bias else None)
        if adapts:
            adapt_logits(graph, d, x, w, product, product if softcap else out)
        if softcap:
            graph.on(d, "softcap").softcap(product, out, c=softcap)
        if top_k:
            chunk, n_chunks = device_ops.top_k_chunks(graph.devices[d].limits, shape[1], top_k)
            ids, values, sums = places(inputs.logits, n_outputs, top_k, n_chunks)
            mask = None
            if graph.kind.masked:
                assert inputs.mask is not None
                mask = inputs.mask.rows(0, n_outputs)
            _top_k(graph, d, out, ids, values, mask)
            if graph.kind.wanted.summed:
                graph.on(d, "log_sum_exp").log_sum_exp(out, sums, chunk=min(chunk, shape[1]))


def _top_k(graph: TensorGraph, d: int, x: View, ids: View, values: View, mask: View | None) -> None:
    on, (n_rows, n), k = graph.on(d, "top_k"), x.shape, graph.kind.wanted.top_k
    chunk, n_chunks = device_ops.top_k_chunks(on.limits, n, k)
    if n_chunks == 1:
        on.top_k(x, ids, values, mask=mask, chunk=n)
        return
    part_ids = replace(graph.scratch((n_rows, n_chunks, k), "top_k ids"), dtype="u32")
    part = graph.scratch((n_rows, n_chunks, k), "top_k values")
    on.top_k(x, part_ids, part, mask=mask, chunk=chunk)
    flat, places = part.reshape(n_rows, n_chunks * k), part_ids.reshape(n_rows, n_chunks * k)
    on.top_k(flat, ids, values, source=places, chunk=n_chunks * k)
