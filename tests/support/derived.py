"""Derives model files from `tests/data`. The derived models have other formats, other shapes, or experts.

Every step is exact or rounds deterministically, and random numbers come from numpy's frozen generator. The
files are therefore equal everywhere, and `tests/data/derived` can store llama.cpp's results for them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
from filelock import FileLock

COPIES = 4  # number of copies of every channel and head element in a widened model
FFN_WIDE = 256
N_EXPERT, N_USED = 8, 2
SHARES = (0.5, 0.25, 0.125, 0.125)


@dataclass(frozen=True)
class Model:
    """A model whose keys lack the architecture's prefix and whose tensors are float32."""

    arch: str
    keys: Mapping[str, tuple[Any, list[gguf.GGUFValueType]]]
    tensors: Mapping[str, np.ndarray]

    def with_keys(self, **values: int) -> Model:
        """Replace integer keys of the architecture. `__` in a name means `.`, for example in
        `attention__key_length`."""
        kind = [gguf.GGUFValueType.UINT32]
        named = {f"{{arch}}.{name.replace('__', '.')}": (value, kind) for name, value in values.items()}
        return replace(self, keys={**self.keys, **named})


def load(path: Path) -> Model:
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    fields = {name: f for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    del fields["general.architecture"], fields["general.file_type"]
    keys = {name.replace(f"{arch}.", "{arch}."): (f.contents(), f.types) for name, f in fields.items()}
    read = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    return Model(arch, keys, {name: values.astype(np.float32) for name, values in read.items()})


def store(path: Path, model: Model, dtype: str, quantize: Callable[..., np.ndarray] | None = None) -> Path:
    """Write the model to `path`. Matrices are stored in `dtype`, or in F16 if a row is not a multiple of the
    block. Vectors and routers are stored in F32. `quantize(name, values, dtype)` replaces gguf-py's
    quantizers."""
    writer = gguf.GGUFWriter(path, model.arch)
    for name, (value, types) in model.keys.items():
        sub_type = types[-1] if types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name.replace("{arch}", model.arch), value, types[0], sub_type)
    named = FILE_TYPES[dtype] if dtype in FILE_TYPES else gguf.LlamaFileType[f"MOSTLY_{dtype}"]
    writer.add_file_type(named)
    for name, values in model.tensors.items():
        if values.dtype == np.int64:
            writer.add_tensor(name, values)
            continue
        kind = kind_of(name, values, dtype)
        raw = (
            quantize(name, values, kind)
            if quantize and kind.name == dtype
            else gguf.quants.quantize(values, kind)
        )
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "MXFP4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
    "Q3_K": gguf.LlamaFileType.MOSTLY_Q3_K_M,
    "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "Q5_K": gguf.LlamaFileType.MOSTLY_Q5_K_M,
}


def kind_of(name: str, values: np.ndarray, dtype: str) -> gguf.GGMLQuantizationType:
    kind = gguf.GGMLQuantizationType[dtype]
    if values.ndim == 1 or "ffn_gate_inp" in name:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    return gguf.GGMLQuantizationType.F16 if values.shape[-1] % block else kind


# ---- other shapes ----


@dataclass(frozen=True)
class Copies:
    """The positions, signs and shares of copied elements. Each of n elements is stored in four positions with
    random signs. A matrix that reads the elements divides each weight among the four copies. Copies do not
    change norms, because the mean square does not change."""

    signs: np.ndarray
    shares: np.ndarray
    order: np.ndarray

    @classmethod
    def drawn(cls, n: int, rng: np.random.RandomState) -> Copies:
        signs = 1 - 2 * rng.randint(2, size=(n, COPIES))
        shares = np.array([rng.permutation(SHARES) for _ in range(n)])
        return cls(signs.astype(np.float32), shares.astype(np.float32), rng.permutation(n * COPIES))

    def written(self, rows: np.ndarray) -> np.ndarray:
        return (rows[:, None] * self.signs[..., None]).reshape(-1, rows.shape[1])[self.order]

    def read(self, matrix: np.ndarray) -> np.ndarray:
        wide = matrix[..., None] * (self.signs * self.shares)
        return np.ascontiguousarray(wide.reshape(*matrix.shape[:-1], -1)[..., self.order])

    def repeated(self, vector: np.ndarray) -> np.ndarray:
        return np.repeat(vector, COPIES)[self.order]


def widened(model: Model) -> Model:
    """Return an equivalent model whose rows have 256 elements. The model has four times the channels and head
    elements, 256 FFN columns, and separate output weights. In a wide head, every fourth RoPE pair has an
    original frequency. The original elements are in these pairs."""
    rng, t = np.random.RandomState(64), model.tensors
    channels = Copies.drawn(t["output_norm.weight"].size, rng)
    n_head, n_kv = (
        int(model.keys[f"{{arch}}.attention.{name}"][0]) for name in ("head_count", "head_count_kv")
    )
    head = t["blk.0.attn_q.weight"].shape[0] // n_head
    n_ff = t["blk.0.ffn_up.weight"].shape[0]
    real = 2 * COPIES * (np.arange(head) // 2) + np.arange(head) % 2

    def heads(rows: np.ndarray, scale: float, rest: float) -> np.ndarray:
        """Widen the rows of q or k. The rows at `real` are the original rows times `scale`. Every other row
        is a copy of an original row times `rest`. For k, `rest` is 0, so scores ignore the other rows."""
        rows = rows.reshape(-1, head, rows.shape[-1])
        wide = rest * np.tile(np.roll(rows, 1, 1), (1, COPIES, 1))
        wide[:, real] = scale * rows
        return wide.reshape(-1, rows.shape[-1])

    wide = {
        "token_embd.weight": channels.written(t["token_embd.weight"].T).T,
        "output_norm.weight": channels.repeated(t["output_norm.weight"]),
        "output.weight": channels.read(t["token_embd.weight"]),
    }
    for il in range(int(model.keys["{arch}.block_count"][0])):
        p, values = f"blk.{il}.", Copies.drawn(head, rng)
        v = [values.written(rows) for rows in np.split(t[p + "attn_v.weight"], n_kv)]
        o = [values.read(columns) for columns in np.split(t[p + "attn_output.weight"], n_head, axis=1)]
        wide |= {
            p + f"{norm}.weight": channels.repeated(t[p + f"{norm}.weight"])
            for norm in ("attn_norm", "ffn_norm")
        }
        # scores are divided by sqrt(head size), which doubles, so q doubles too
        wide[p + "attn_q.weight"] = channels.read(heads(t[p + "attn_q.weight"], COPIES**0.5, 1.0))
        wide[p + "attn_k.weight"] = channels.read(heads(t[p + "attn_k.weight"], 1.0, 0.0))
        wide[p + "attn_v.weight"] = channels.read(np.concatenate(v))
        wide[p + "attn_output.weight"] = channels.written(np.concatenate(o, axis=1))
        order = rng.permutation(FFN_WIDE) % n_ff
        spare = np.arange(FFN_WIDE) >= 0
        _, first = np.unique(order, return_index=True)
        spare[first] = False  # only the first copy of a column computes; the other copies contribute 0
        for name in ("ffn_gate", "ffn_up"):
            wide[p + f"{name}.weight"] = channels.read(t[p + f"{name}.weight"][order])
        down = np.where(spare, 0, t[p + "ffn_down.weight"][:, order]).astype(np.float32)
        wide[p + "ffn_down.weight"] = channels.written(down)
    sizes = {"attention__key_length": head * COPIES, "attention__value_length": head * COPIES}
    sizes |= {"embedding_length": channels.order.size, "feed_forward_length": FFN_WIDE}
    wide = {name: np.ascontiguousarray(values, np.float32) for name, values in wide.items()}
    return replace(model, tensors=wide).with_keys(**sizes, rope__dimension_count=head * COPIES)


def as_qwen2(model: Model) -> Model:
    """Convert to qwen2, with random biases. In qwen2, RoPE pairs the two halves of each head's rows."""
    rng, tensors = np.random.RandomState(2), dict(model.tensors)
    for name, rows in model.tensors.items():
        layer, _, matrix = name.removesuffix(".weight").rpartition(".")
        if matrix in ("attn_q", "attn_k"):
            tensors[name] = in_halves(model, rows)
        if matrix in ("attn_q", "attn_k", "attn_v"):
            bias = rng.randint(-16, 17, size=len(rows)) / np.float32(64)
            tensors[f"{layer}.{matrix}.bias"] = bias.astype(np.float32)
    return replace(model, arch="qwen2", tensors=tensors)


def as_mixture(model: Model) -> Model:
    """Replace the FFN by eight experts, of which each token uses two. An expert contains the FFN's columns in
    another order, and its up and down weights are rescaled. A different eighth of the columns is zero in each
    expert, so the choice of experts changes the result."""
    rng, tensors = np.random.RandomState(8), dict(model.tensors)
    for il in range(int(model.keys["{arch}.block_count"][0])):
        p = f"blk.{il}."
        gate, up, down = (tensors.pop(f"{p}ffn_{name}.weight") for name in ("gate", "up", "down"))
        orders = [rng.permutation(len(up)) for _ in range(N_EXPERT)]
        scales = [np.float32(2.0 ** (e % 3 - 1)) for e in range(N_EXPERT)]
        idle = [order % N_EXPERT == e for e, order in enumerate(orders)]
        tensors[p + "ffn_gate_inp.weight"] = rng.randint(-8, 9, size=(N_EXPERT, up.shape[1])) / np.float32(16)
        tensors[p + "ffn_gate_exps.weight"] = np.stack([gate[order] for order in orders])
        tensors[p + "ffn_up_exps.weight"] = np.stack([s * up[o] for s, o in zip(scales, orders, strict=True)])
        tensors[p + "ffn_down_exps.weight"] = np.stack(
            [np.where(i, 0, down[:, o] / s) for s, o, i in zip(scales, orders, idle, strict=True)]
        ).astype(np.float32)
    return replace(model, tensors=tensors).with_keys(expert_count=N_EXPERT, expert_used_count=N_USED)


def in_halves(model: Model, rows: np.ndarray) -> np.ndarray:
    """Reorder the rows of q or k. Before, RoPE pairs neighbours; after, it pairs the halves of a head."""
    head = int(model.keys["{arch}.rope.dimension_count"][0])
    halves = np.r_[0:head:2, 1:head:2]
    return rows.reshape(-1, head, rows.shape[1])[:, halves].reshape(rows.shape)


def as_head(model: Model, head: Path) -> Model:
    """Convert to glm4moe without experts, with the multi-token prediction head of `head` (make_head.py). In
    glm4moe, RoPE pairs the two halves of each head's rows."""
    n_layer = int(model.keys["{arch}.block_count"][0])
    tensors = model.tensors | {name: v.astype(np.float32) for name, v in np.load(head).items()}
    named = {
        name.replace("ffn_norm", "post_attention_norm"): in_halves(model, values)
        if name.endswith(("attn_q.weight", "attn_k.weight"))
        else values
        for name, values in tensors.items()
    }
    more = {"block_count": n_layer + 1, "nextn_predict_layers": 1}
    return replace(model, arch="glm4moe", tensors=named).with_keys(**more)


def eagle3_of(model: Model, head: Path) -> Model:
    """Return the EAGLE-3 head of `head` (make_eagle3.py), with the model's vocabulary and rows of its output
    matrix."""
    tensors = {name: v if name == "d2t" else v.astype(np.float32) for name, v in np.load(head).items()}
    tensors["output.weight"] = model.tensors["token_embd.weight"][tensors["d2t"]]
    layers = [1, 3, 4]
    kinds = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32]
    keys = {**model.keys, "{arch}.target_layers": (layers, kinds)}
    sizes = {"block_count": 1, "feed_forward_length": len(tensors["blk.0.ffn_gate.weight"])}
    return replace(model, arch="eagle3", keys=keys, tensors=tensors).with_keys(
        **sizes, target_hidden_size=model.tensors["token_embd.weight"].shape[1]
    )


# ---- the files ----

# name: (source in `tests/data`, change of shape, formats)
FAMILIES: dict[str, tuple[str, Callable[[Model], Model], tuple[str, ...]]] = {
    "w256": (
        "stories-w256-F16",
        lambda model: model,
        ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4"),
    ),
    "narrow": ("stories-narrow-F16", lambda model: model, ("F32", "Q8_0", "Q4_0")),
    "wide": ("stories-narrow-F16", widened, ("F16", "Q8_0", "Q4_0")),
    "qwen2": ("stories-narrow-F16", lambda model: as_qwen2(widened(model)), ("Q8_0",)),
    "moe8x": ("stories-narrow-F16", lambda model: as_mixture(widened(model)), ("Q4_0", "MXFP4")),
}
DERIVED = [f"stories-{family}-{dtype}" for family, (_, _, types) in FAMILIES.items() for dtype in types]


def derive(data: Path, folder: Path) -> None:
    for family, (source, shape, types) in FAMILIES.items():
        model = shape(load(data / f"{source}.gguf"))
        for dtype in types:
            store(folder / f"stories-{family}-{dtype}.gguf", model, dtype)


def derived_once(data: Path, cache: Path) -> Path:
    """Derive the files once for all test runs, in 2 s and 29 MB, and return their folder. The folder's name
    is a digest of all inputs that determine the files."""
    sources = [Path(__file__), *(data / f"{name}.gguf" for name in sorted({f[0] for f in FAMILIES.values()}))]
    digest = hashlib.sha256(version("gguf").encode())
    for source in sources:
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    folder = cache / f"derived-{digest.hexdigest()[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "derived.lock"):
        if not folder.is_dir():
            with TemporaryDirectory(dir=cache) as incomplete:
                (files := Path(incomplete) / "files").mkdir()
                derive(data, files)
                files.rename(folder)
            remove_unused(cache, folder)
        os.utime(folder)
    return folder


def remove_unused(cache: Path, kept: Path) -> None:
    """Remove folders of derived files that no run used in the last day."""
    for folder in cache.glob("derived-*"):
        if folder != kept and folder.stat().st_mtime < time.time() - 86400:
            shutil.rmtree(folder)
