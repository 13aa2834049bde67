"""llama.cpp as an oracle: the C library inside the `xllamacpp` package, called with ctypes on the CPU.

F32 KV cache, flash attention off. The layout of the context's parameters is not part of any stable interface,
so the defaults found at the offsets used here are checked first.
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

F32, F16 = 0, 1  # of ggml_type
# offset: (default, ours)
CONTEXT = {
    0: (512, 64),  # n_ctx
    4: (2048, 64),  # n_batch
    8: (512, 64),  # n_ubatch
    28: (4, 1),  # n_threads: every sum in one order
    32: (4, 1),
    52: (-1, 0),  # flash attention: automatic, off
    104: (F16, F32),  # K
    108: (F16, F32),  # V
}
N_GPU_LAYERS, VOCAB_ONLY = 16, 72
ERROR = 4  # of ggml_log_level
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@_LOG
def _log(level: int, text: bytes, _: int) -> None:
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class _Parameters(ctypes.Structure):
    """Any parameter structure: passed in memory, and the callee reads no further than its own size."""

    _fields_ = (("raw", ctypes.c_uint8 * 512),)

    def set(self, offset: int, default: int, value: int) -> None:
        found = struct.unpack_from("<i", bytes(self.raw), offset)[0]
        if found != default:
            raise RuntimeError(f"llama.cpp's parameters changed: {found} at offset {offset}, not {default}")
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
def _library() -> ctypes.CDLL:
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
    lib.llama_set_adapter_cvec.argtypes = [
        ctypes.c_void_p, np.ctypeslib.ndpointer(np.float32), ctypes.c_size_t, *[ctypes.c_int32] * 3
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


def logits(
    path: Path,
    batches: Sequence[Sequence[int]],
    n_vocab: int,
    steering: Mapping[int, np.ndarray] | None = None,
) -> np.ndarray:
    """Logits of every token of consecutive batches, float32 [n_tokens, n_vocab]; `steering` adds control
    vectors behind the layers from 1 on."""
    lib = _library()
    model_params, params = lib.llama_model_default_params(), lib.llama_context_default_params()
    model_params.set(N_GPU_LAYERS, -1, 0)
    for offset, (default, value) in CONTEXT.items():
        params.set(offset, default, value)
    if not (model := lib.llama_model_load_from_file(str(path).encode(), model_params)):
        raise ValueError(f"llama.cpp does not load {path.name}")
    context = lib.llama_init_from_model(model, params)
    assert context, "no context"
    if steering:
        data = np.stack([steering[il] for il in range(1, len(steering) + 1)])
        assert data.dtype == np.float32
        status = lib.llama_set_adapter_cvec(context, data, data.size, data.shape[1], 1, len(data))
        assert status == 0, "no control vectors"
    rows, pos = [], 0
    for tokens in batches:
        n = len(tokens)
        batch = _Batch(
            n,
            (ctypes.c_int32 * n)(*tokens),
            None,
            (ctypes.c_int32 * n)(*range(pos, pos + n)),
            None,
            None,
            (ctypes.c_int8 * n)(*[1] * n),
        )
        if status := lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        rows += [
            np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (n_vocab,)).copy() for i in range(n)
        ]
        pos += n
    lib.llama_free(context)
    lib.llama_model_free(model)
    return np.stack(rows)


class Vocabulary:
    """What llama.cpp makes of the vocabulary of a file."""

    def __init__(self, path: Path) -> None:
        self._lib = _library()
        params = self._lib.llama_model_default_params()
        params.set(VOCAB_ONLY, 0x00010000, 0x00010001)  # four switches: this one, and the third that is on
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp does not load {path.name}")
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self.add_bos = bool(self._lib.llama_vocab_get_add_bos(self._vocab))

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        raw = text.encode()
        ids = (ctypes.c_int32 * (len(raw) + 8))()
        n = self._lib.llama_tokenize(self._vocab, raw, len(raw), ids, len(ids), add_special, parse_special)
        assert n >= 0, n
        return ids[:n]

    def piece(self, token: int) -> bytes:
        """With the text of special tokens."""
        buffer = ctypes.create_string_buffer(256)
        n = self._lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[:n]

    def ends(self, token: int) -> bool:
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    def close(self) -> None:
        self._lib.llama_model_free(self._model)
