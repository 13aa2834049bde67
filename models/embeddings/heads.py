"""The parts of an embedding model or reranker after pooling, computed on the host.

These are dense layers (EmbeddingGemma, Sentence Transformers' Dense) and classification heads. A head needs a
million multiplications per text, so a device would gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.formats import dequantize
from vkbackend.models.embeddings.pooling import POOLINGS
from vkbackend.models.gguf.reader import GGUF

GENERATIVE = ("qwen3", "qwen3vl")  # rerankers that are decoders, with the logits of yes and no
NORM_EPS = 1e-5


class Dense(NamedTuple):
    """y = w x + b, in float64. `w` is [n_out, n_in]."""

    w: np.ndarray
    b: np.ndarray | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y: np.ndarray = x @ self.w.T
        return y if self.b is None else y + self.b


@dataclass(frozen=True)
class Classifier:
    """A classification head: `output` after an optional dense layer, activation and layer norm. `pooling` is
    how its input is pooled."""

    output: Dense
    labels: tuple[str, ...]
    pooling: str
    dense: Dense | None = None
    activation: Callable[[np.ndarray], np.ndarray] = np.tanh
    norm: Dense | None = None

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Return the logits [n_labels] of a pooled text [n_embd]."""
        if self.dense:
            x = self.activation(self.dense(x))
        if self.norm:
            x = (x - x.mean()) / np.sqrt(x.var() + NORM_EPS) * self.norm.w
            x = x if self.norm.b is None else x + self.norm.b
        return self.output(x)

    @property
    def answers(self) -> bool:
        """Return whether the labels are yes and no, whose probabilities are a softmax."""
        return self.labels == ("yes", "no")

    def score(self, logits: np.ndarray, *, raw: bool) -> float:
        """Return a document's relevance in 0..1, or the logit if `raw`. Raises UnsupportedModel."""
        if len(logits) > 1 and not self.answers:
            raise UnsupportedModel(
                f"the model is a classifier with {len(logits)} labels ({', '.join(self.labels)[:100]}), "
                "not a reranker; use classify"
            )
        if raw:
            return float(logits[0])
        return float(probabilities(logits)[0])


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid of a single logit, or the softmax of several."""
    several = np.append(logits, 0.0) if len(logits) == 1 else logits
    powers = np.exp(several - several.max())
    result: np.ndarray = (powers / powers.sum())[: len(logits)]
    return result


@dataclass(frozen=True)
class Heads:
    """A file's data about embeddings. `pooling` is None if the file names no pooling. If `is_listwise`, the
    model ranks all documents in one prompt."""

    pooling: str | None
    dense: tuple[Dense, ...]
    classifier: Classifier | None
    rerank_template: str | None
    n_embd: int
    is_listwise: bool = False

    @classmethod
    def read(cls, gguf: GGUF) -> Heads:
        """Raises GGUFError for tensors or keys that do not fit."""
        arch = gguf.architecture
        kind = gguf.u32(f"{arch}.pooling_type", None)
        if kind is not None and kind >= len(POOLINGS):
            raise GGUFError(
                f"{gguf.paths[0]}: {arch}.pooling_type is {kind}, expected 0..{len(POOLINGS) - 1}"
            )
        layers = [_dense(gguf, name) for name in ("dense_2", "dense_3")]
        dense = tuple(layer for layer in layers if layer)
        n_embd = gguf.u32(f"{arch}.embedding_length", 0)
        width = n_embd
        for layer in dense:
            if layer.w.shape[1] != width:
                raise GGUFError(
                    f"{gguf.paths[0]}: a dense layer reads {layer.w.shape[1]} values, expected {width}"
                )
            width = len(layer.w)
        template = gguf.string("tokenizer.chat_template.rerank", None)
        pooling = None if kind is None else POOLINGS[kind]
        named = gguf.string("general.name", "").lower().replace(" ", "-")
        is_listwise = "jina-reranker-v3" in named
        return cls(pooling, dense, _classifier(gguf, n_embd), template, width, is_listwise)

    def embedding(self, pooled: np.ndarray) -> np.ndarray:
        for layer in self.dense:
            pooled = layer(pooled)
        return pooled


def _classifier(gguf: GGUF, n_embd: int) -> Classifier | None:
    arch, path = gguf.architecture, gguf.paths[0]
    output, dense = _dense(gguf, "cls.output"), _dense(gguf, "cls")
    if output is None:
        if dense is None or len(dense.w) != 1:
            return None
        output, dense = dense, None  # the head has only one layer
    norm = _vectors(gguf, "cls.norm")
    sizes = [layer.w.shape for layer in (dense, output) if layer]
    if sizes[0][1] != n_embd or sizes[-1][1] != sizes[0][0] * (len(sizes) > 1) + n_embd * (len(sizes) == 1):
        raise GGUFError(f"{path}: the classification head has shapes {sizes}, expected inputs of {n_embd}")
    labels = tuple(gguf.strings(f"{arch}.classifier.output_labels", []))
    n = len(output.w)
    if labels and len(labels) != n:
        raise GGUFError(f"{path}: the classification head has {n} outputs and {len(labels)} labels")
    if not labels and arch in GENERATIVE and n == 2:
        labels = ("yes", "no")
    labels = labels or tuple(f"LABEL_{i}" for i in range(n))
    if arch in GENERATIVE:
        return Classifier(output, labels, "last", dense)
    if arch == "modern-bert":
        return Classifier(output, labels, "mean", dense, gelu, norm)
    return Classifier(output, labels, "cls", dense, norm=norm)


def gelu(x: np.ndarray) -> np.ndarray:
    """Return the exact GELU (Hendrycks and Gimpel 2016)."""
    erf: np.ndarray = np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))
    return 0.5 * x * (1 + erf)


def _dense(gguf: GGUF, name: str) -> Dense | None:
    w = _values(gguf, f"{name}.weight")
    if w is None:
        return None
    w = w.reshape(-1, w.shape[-1])
    b = _values(gguf, f"{name}.bias")
    if b is not None and b.size != len(w):
        raise GGUFError(f"{gguf.paths[0]}: {name}.bias has {b.size} values, expected {len(w)}")
    return Dense(w, None if b is None else b.reshape(-1))


def _vectors(gguf: GGUF, name: str) -> Dense | None:
    w, b = _values(gguf, f"{name}.weight"), _values(gguf, f"{name}.bias")
    return None if w is None else Dense(w.reshape(-1), b)


def _values(gguf: GGUF, name: str) -> np.ndarray | None:
    tensors: Mapping[str, object] = gguf.tensors
    if name not in tensors:
        return None
    info = gguf.tensors[name]
    values = dequantize(gguf.data(name).reshape(-1).view(np.uint8), info.type, info.shape)
    return values.astype(np.float64)
