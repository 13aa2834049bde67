"""Embeddings of n-grams (Cheng et al. 2026, arXiv:2601.07372). One layer adds them to a residual of several
streams. An n-gram's hash is its row in the table of embeddings.

A row's n-grams have 2 to `longest` tokens and end at the row's token. Tokens before an end of text count as
ends of text. Each n-gram has several heads: each hashes it to another row, and the rows are concatenated.
Products turn the concatenation into a value, and into a key per stream. The product of stream and key weighs
the value. A convolution over every `longest`-th row is added to the result.
"""

from __future__ import annotations

import numpy as np

from vkbackend.errors import GGUFError
from vkbackend.formats import dequantize
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.ops import streams
from vkbackend.meta.ops.recurrent import ssm_conv
from vkbackend.meta.ops.vocabulary import embed_ngrams
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.memory_specs import LayerState, StateSpec
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF

TABLE, TOKENS, HASHES = "per_layer_token_embd", "token_numbers", "ngram_hashes"


class Ngrams:
    """The embeddings in layer `il` of a model with `n_stream` streams of `n_embd` values."""

    def __init__(self, gguf: GGUF, il: int, n_embd: int, n_vocab: int, n_stream: int, eps: float) -> None:
        arch, path = gguf.architecture, gguf.paths[0]
        self.il, self.n_embd, self.n_vocab, self.n_stream, self.eps = il, n_embd, n_vocab, n_stream, eps
        self.longest, per_length, kernel, self.width = (
            read_count(gguf, key)
            for key in (
                "ple.ngram_size",
                "ple.heads_per_ngram",
                "ple.conv_kernel",
                "embedding_length_per_layer_input",
            )
        )
        self.n_heads = n = (self.longest - 1) * per_length
        self.end = int(gguf.u32(f"{arch}.ple.eos_token_id"))
        factors, sizes, offsets = (
            [int(value) for value in gguf.ints(f"{arch}.ple.{key}")]
            for key in ("layer_multipliers", "head_vocab_sizes", "head_offsets")
        )
        info = gguf.tensors.get(f"{TABLE}.weight")
        self.n_rows = info.shape[0] if info else 0
        ends = [size + offset for size, offset in zip(sizes, offsets, strict=False)]
        if (
            self.longest < 2
            or (len(factors), len(sizes), len(offsets)) != (self.longest, n, n)
            or not 0 < min(sizes) <= max(ends) <= min(self.n_rows, (1 << 31) - 1)
            or n * self.width != n_embd
            or not 0 <= self.end < n_vocab
        ):
            raise GGUFError(f"{path}: the keys {arch}.ple.* do not fit {TABLE}.weight")
        words = np.array(factors, "<u8").view("<u4")
        self.hashes = np.concatenate([words, np.array([*sizes, *offsets])]).astype(np.uint32)
        self.unread = f"blk.{il}.ple_conv1d.weight"
        if (info := gguf.tensors.get(self.unread)) is None:
            raise GGUFError(f"{path}: the tensor {self.unread!r} is missing")
        taps = dequantize(gguf.data(self.unread), info.type, info.shape).reshape(-1, kernel)
        # A convolution over every `longest`-th row is a convolution over all rows whose other factors are 0.
        self.taps = np.zeros((len(taps), (kernel - 1) * self.longest + 1), np.float32)
        self.taps[:, :: self.longest] = taps

    def outer_weights(self) -> list[WeightSpec]:
        numbers = np.arange(self.n_vocab, dtype=np.float32) - self.end
        table = np.repeat(numbers[:, None], self.longest, 1)
        return [
            WeightSpec(f"{TABLE}.weight", (self.n_rows, self.width), host=True),
            WeightSpec(f"{TOKENS}.weight", table.shape, host=True, values=table),
            WeightSpec(f"{HASHES}.weight", self.hashes.shape, values=self.hashes, dtype="u32"),
        ]

    def layer_weights(self) -> list[WeightSpec]:
        n, wide = self.n_embd, self.n_stream * self.n_embd
        shifts = np.eye(self.longest, dtype=np.float32)[::-1].copy()  # vector k selects the k-th row before
        return [
            WeightSpec("ple_key", (wide, n)),
            WeightSpec("ple_value", (n, n)),
            *(WeightSpec(f"ple_norm_{name}", (wide,)) for name in ("key", "query", "conv")),
            WeightSpec("ple_taps", self.taps.shape, values=self.taps, f32=True),
            WeightSpec("token_shifts", shifts.shape, values=shifts, f32=True),
        ]

    def state(self) -> StateSpec:
        """Return the state: the last tokens, and the convolution's last columns."""
        columns, tokens = self.taps.size - len(self.taps), self.longest * (self.longest - 1)
        return StateSpec(1, (("ngrams", (columns,)), ("tokens", (tokens,))), "shifts")

    # ---- graph ----

    def begin(self, graph: Graph, w: Weights) -> None:
        """Keep the tables, and the step's token ids minus the id of the end of text."""
        graph.kept[TOKENS] = ops.embed(graph, w(TOKENS))
        self.tables = w(HASHES), w(TABLE)

    def forward(self, h: Tensor, w: Weights, state: LayerState) -> Tensor:
        """Return what the embeddings add to the streams h."""
        tokens = ssm_conv(h.graph.kept[TOKENS], w("token_shifts"), state.arrays["tokens"], silu=False)
        e = embed_ngrams(tokens, *self.tables, self.n_heads, self.end)
        key = self.normed(linear(e, w, "ple_key"), w, "ple_norm_key")
        y = streams.gate(self.normed(h, w, "ple_norm_query"), key, linear(e, w, "ple_value"))
        return y + ssm_conv(self.normed(y, w, "ple_norm_conv"), w("ple_taps"), state.arrays["ngrams"])

    def normed(self, h: Tensor, w: Weights, name: str) -> Tensor:
        return ops.mul_vector(ops.head_norm(h, None, self.n_embd, self.eps), w(name))
