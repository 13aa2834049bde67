"""Uses llama.cpp as an oracle. ctypes calls the C library in `xllamacpp`. llama.cpp runs on the CPU, with an
F32 KV cache and without flash attention. The layouts of llama.cpp's parameters are not stable, so the
defaults are checked first.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

F32, F16 = 0, 1  # Numbers of types in ggml.
# offset of a parameter -> (default, value here)
CONTEXT = {
    0: (512, 64),
    4: (2048, 64),
    8: (512, 64),
    28: (4, 1),  # n_threads: a single thread adds in a fixed order
    32: (4, 1),
    52: (-1, 0),  # flash attention: automatic -> off
    104: (F16, F32),
    108: (F16, F32),
}
N_GPU_LAYERS, VOCAB_ONLY = 16, 72
ERROR = 4  # a ggml_log_level
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@_LOG
def _log(level: int, text: bytes, _: int) -> None:
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class _Parameters(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_uint8 * 512),)

    def set(self, offset: int, default: int, value: int) -> None:
        value_there = struct.unpack_from("<i", bytes(self.raw), offset)[0]
        if value_there != default:
            raise RuntimeError(
                f"llama.cpp's parameters changed: {value_there} at offset {offset}, not {default}"
            )
        self.raw[offset : offset + 4] = list(struct.pack("<i", value))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


@cache
def library() -> ctypes.CDLL:
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise ImportError("xllamacpp is not installed")
    lib = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("*.so"))))
    for kind in ("model", "context"):
        getattr(lib, f"llama_{kind}_default_params").restype = _Parameters
    lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Parameters]
    lib.llama_model_load_from_file.restype = ctypes.c_void_p
    lib.llama_init_from_model.argtypes = [ctypes.c_void_p, _Parameters]
    lib.llama_init_from_model.restype = ctypes.c_void_p
    lib.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
    lib.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    lib.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    lib.llama_set_embeddings.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    lib.llama_get_embeddings_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    lib.llama_get_embeddings_ith.restype = ctypes.POINTER(ctypes.c_float)
    lib.llama_set_adapter_cvec.argtypes = [
        ctypes.c_void_p, np.ctypeslib.ndpointer(np.float32), ctypes.c_size_t, *[ctypes.c_int32] * 3
    ]  # fmt: skip
    lib.llama_adapter_lora_init.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    lib.llama_adapter_lora_init.restype = ctypes.c_void_p
    lib.llama_set_adapters_lora.argtypes = [
        ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.POINTER(ctypes.c_float)
    ]  # fmt: skip
    lib.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    lib.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    lib.ggml_row_size.restype = lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p
    ]  # fmt: skip
    lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    lib.llama_model_get_vocab.restype = ctypes.c_void_p
    lib.llama_tokenize.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32,
        ctypes.c_bool, ctypes.c_bool
    ]  # fmt: skip
    lib.llama_token_to_piece.argtypes = [
        ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, *[ctypes.c_int32] * 2, ctypes.c_bool
    ]  # fmt: skip
    lib.llama_vocab_is_eog.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    lib.llama_vocab_is_eog.restype = lib.llama_vocab_get_add_bos.restype = ctypes.c_bool
    lib.llama_vocab_get_add_bos.argtypes = [ctypes.c_void_p]
    lib.llama_free.argtypes = lib.llama_model_free.argtypes = [ctypes.c_void_p]
    lib.llama_log_set.argtypes = [_LOG, ctypes.c_void_p]
    lib.llama_log_set(_log, None)
    lib.llama_backend_init()
    return lib


def versions() -> str:
    return f"llama.cpp in xllamacpp {version('xllamacpp')}"


class Context:
    def __init__(self, path: Path, n_vocab: int, steering: Mapping[int, np.ndarray] | None = None) -> None:
        self._lib, self._n_vocab, self._pos = library(), n_vocab, 0
        model_params, params = (
            self._lib.llama_model_default_params(),
            self._lib.llama_context_default_params(),
        )
        model_params.set(N_GPU_LAYERS, -1, 0)
        for offset, (default, value) in CONTEXT.items():
            params.set(offset, default, value)
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise ValueError(f"llama.cpp does not load {path.name}")
        self._context = self._lib.llama_init_from_model(self._model, params)
        assert self._context, "no context"
        if steering:
            data = np.stack([steering[il] for il in range(1, len(steering) + 1)])
            assert data.dtype == np.float32
            status = self._lib.llama_set_adapter_cvec(
                self._context, data, data.size, data.shape[1], 1, len(data)
            )
            assert status == 0, "no control vectors"

    def apply(self, adapters: Sequence[tuple[Path, float]]) -> None:
        n = len(adapters)
        loaded = [self._lib.llama_adapter_lora_init(self._model, str(path).encode()) for path, _ in adapters]
        assert all(loaded), "no adapter"
        scales = (ctypes.c_float * n)(*[scale for _, scale in adapters])
        assert (
            self._lib.llama_set_adapters_lora(self._context, (ctypes.c_void_p * n)(*loaded), n, scales) == 0
        )

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        self._run(tokens)
        rows = (self._lib.llama_get_logits_ith(self._context, i) for i in range(len(tokens)))
        return np.stack([np.ctypeslib.as_array(row, (self._n_vocab,)).copy() for row in rows])

    def hidden(self, tokens: Sequence[int], n_embd: int) -> np.ndarray:
        """Return the hidden states of a text, float32 [n_tokens, n_embd]. The file's pooling must be none."""
        self._lib.llama_set_embeddings(self._context, True)
        self._run(tokens)
        rows = (self._lib.llama_get_embeddings_ith(self._context, i) for i in range(len(tokens)))
        return np.stack([np.ctypeslib.as_array(row, (n_embd,)).copy() for row in rows])

    def _run(self, tokens: Sequence[int]) -> None:
        n, lib = len(tokens), self._lib
        batch = _Batch(
            n,
            (ctypes.c_int32 * n)(*tokens),
            None,
            (ctypes.c_int32 * n)(*range(self._pos, self._pos + n)),
            None,
            None,
            (ctypes.c_int8 * n)(*[1] * n),
        )
        if status := lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        self._pos += n

    def close(self) -> None:
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


def logits(
    path: Path,
    batches: Sequence[Sequence[int]],
    n_vocab: int,
    steering: Mapping[int, np.ndarray] | None = None,
    adapters: Sequence[tuple[Path, float]] = (),
) -> np.ndarray:
    """Return the logits of consecutive batches, float32 [n_tokens, n_vocab]. `steering` maps layers 1 to n to
    control vectors. `adapters` lists files and scales."""
    context = Context(path, n_vocab, steering)
    if adapters:
        context.apply(adapters)
    rows = [context.decode(tokens) for tokens in batches]
    context.close()
    return np.concatenate(rows)


def hidden(path: Path, tokens: Sequence[int], n_embd: int) -> np.ndarray:
    context = Context(path, 0)
    rows = context.hidden(tokens, n_embd)
    context.close()
    return rows


def quantized(values: np.ndarray, kind: int, importance: np.ndarray | None = None) -> np.ndarray:
    """Quantize rows of float32 [n, k] to the ggml type `kind`, as `llama-quantize --pure` does. The result is
    uint8 [n, row bytes]."""
    n, k = values.shape
    values, lib = np.ascontiguousarray(values, np.float32), library()
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    if importance is None and lib.ggml_quantize_requires_imatrix(kind):
        raise ValueError(f"type {kind} needs to know which columns matter")
    raw = np.empty((n, lib.ggml_row_size(kind, k)), np.uint8)
    pointer = None if weights is None else weights.ctypes.data
    written = lib.ggml_quantize_chunk(kind, values.ctypes.data, raw.ctypes.data, 0, n, k, pointer)
    assert written == raw.nbytes
    return raw


class Vocabulary:
    def __init__(self, path: Path) -> None:
        self._lib = library()
        params = self._lib.llama_model_default_params()
        # VOCAB_ONLY is the first of four one-byte switches. The third switch is on by default.
        params.set(VOCAB_ONLY, 0x00010000, 0x00010001)
        self.model = self._lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise ValueError(f"llama.cpp does not load {path.name}")
        self._vocab = self._lib.llama_model_get_vocab(self.model)
        self.add_bos = bool(self._lib.llama_vocab_get_add_bos(self._vocab))

    @property
    def pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._vocab)

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        raw = text.encode()
        ids = (ctypes.c_int32 * (4 * len(raw) + 8))()
        n = self._lib.llama_tokenize(self._vocab, raw, len(raw), ids, len(ids), add_special, parse_special)
        assert n >= 0, n
        return ids[:n]

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        n = self._lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[:n]

    def ends(self, token: int) -> bool:
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    def close(self) -> None:
        self._lib.llama_model_free(self.model)
