"""Uses llama.cpp's samplers as an oracle: a chain of samplers processes one row of logits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from oracles import llama_cpp

from vkbackend.models.sampling.params import SamplingParams

ALL = 1 << 20
# llama.cpp's public function for DRY takes breakers as texts. This function, which llama.cpp's tests use,
# takes breakers as tokens.
DRY = "_Z30llama_sampler_init_dry_testingffiiRKSt6vectorIS_IiSaIiEESaIS1_EE"


class _Token(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float))


class _Tokens(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(_Token)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


class _Vector(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("capacity", ctypes.c_void_p))

    @classmethod
    def of(cls, array: Any) -> _Vector:
        begin = ctypes.addressof(array)
        end = begin + ctypes.sizeof(array)
        return cls(begin, end, end)


class _Bias(ctypes.Structure):
    _fields_ = (("token", ctypes.c_int32), ("bias", ctypes.c_float))


def _make(name: str, *arguments: Any) -> int:
    function = getattr(llama_cpp.library(), name if name.startswith("_") else f"llama_sampler_init_{name}")
    function.restype = ctypes.c_void_p
    handle = function(*arguments)
    assert handle, name
    return int(handle)


def _f(value: float) -> ctypes.c_float:
    return ctypes.c_float(value)


def _dry(p: SamplingParams, breakers: Sequence[Sequence[int]]) -> int:
    arrays = [(ctypes.c_int32 * len(b))(*b) for b in breakers]
    inner = (_Vector * len(arrays))(*map(_Vector.of, arrays))
    last = ALL if p.dry_penalty_last_n == -1 else p.dry_penalty_last_n
    outer = ctypes.byref(_Vector.of(inner))
    return _make(DRY, _f(p.dry_multiplier), _f(p.dry_base), p.dry_allowed_length, last, outer)


def _samplers(p: SamplingParams, n_vocab: int) -> Iterator[int]:
    """Yield the samplers of the chain in common/sampling.cpp, without the final draw."""
    if p.logit_bias:
        pairs = (_Bias * len(p.logit_bias))(*(_Bias(*pair) for pair in p.logit_bias))
        yield _make("logit_bias", n_vocab, len(pairs), pairs)
    if p.mirostat:
        yield _make("temp", _f(p.temperature))
        values = _f(p.mirostat_tau), _f(p.mirostat_eta)
        if p.mirostat == 1:
            yield _make("mirostat", n_vocab, 1, *values, 100)
        else:
            yield _make("mirostat_v2", 1, *values)
        return
    last = ALL if p.repeat_last_n == -1 else p.repeat_last_n
    keep = ctypes.c_size_t(0)
    make: dict[str, Callable[[], int]] = {
        "penalties": lambda: _make(
            "penalties", n_vocab, last, _f(p.repeat_penalty), _f(p.frequency_penalty), _f(p.presence_penalty)
        ),
        "dry": lambda: _dry(p, [b for b in p.dry_sequence_breakers if not isinstance(b, str)]),
        "top_n_sigma": lambda: _make("top_n_sigma", _f(p.top_n_sigma)),
        "top_k": lambda: _make("top_k", p.top_k),
        "typ_p": lambda: _make("typical", _f(p.typical_p), keep),
        "top_p": lambda: _make("top_p", _f(p.top_p), keep),
        "min_p": lambda: _make("min_p", _f(p.min_p), keep),
        "xtc": lambda: _make("xtc", _f(p.xtc_probability), _f(p.xtc_threshold), keep, 1),
        "temperature": lambda: _make(
            "temp_ext", _f(p.temperature), _f(p.dynatemp_range), _f(p.dynatemp_exponent)
        ),
    }
    for name in p.samplers:
        if name != "dry" or p.dry:  # llama.cpp's function for tests cannot disable DRY
            yield make[name]()


class Chain:
    def __init__(self, p: SamplingParams, n_vocab: int) -> None:
        self._lib = llama_cpp.library()
        for name in ("apply", "accept", "free"):
            getattr(self._lib, f"llama_sampler_{name}").restype = None
        self._samplers = [ctypes.c_void_p(sampler) for sampler in _samplers(p, n_vocab)]

    def accept(self, token: int) -> None:
        for sampler in self._samplers:
            self._lib.llama_sampler_accept(sampler, ctypes.c_int32(token))

    def apply(self, logits: np.ndarray) -> tuple[dict[int, float], int | None]:
        tokens = (_Token * len(logits))(*((i, float(x), 0.0) for i, x in enumerate(logits)))
        c = _Tokens(tokens, len(logits), -1, False)
        for sampler in self._samplers:
            self._lib.llama_sampler_apply(sampler, ctypes.byref(c))
        left = {c.data[i].id: c.data[i].logit for i in range(c.size) if c.data[i].logit > -np.inf}
        drawn = c.data[c.selected].id if c.selected >= 0 else None
        peak = max(left.values())
        weights = {token: float(np.exp(np.float64(x) - peak)) for token, x in left.items()}
        total = sum(weights.values())
        return {token: w / total for token, w in weights.items()}, drawn

    def close(self) -> None:
        for sampler in self._samplers:
            self._lib.llama_sampler_free(sampler)


@contextmanager
def chain(p: SamplingParams, n_vocab: int) -> Iterator[Chain]:
    samplers = Chain(p, n_vocab)
    try:
        yield samplers
    finally:
        samplers.close()


def distribution(p: SamplingParams, logits: np.ndarray, history: Sequence[int]) -> dict[int, float]:
    with chain(p, len(logits)) as samplers:
        for token in history:
            samplers.accept(token)
        return samplers.apply(logits)[0]


def dry_of_texts(
    vocabulary: llama_cpp.Vocabulary, n_vocab: int, breakers: Sequence[str], history: Sequence[int]
) -> dict[int, float]:
    """Return the DRY penalty of each token, with multiplier 0.8 and base 1.75, for repetitions from 2 tokens
    on."""
    texts = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
    values = _f(0.8), _f(1.75), 2, ALL, texts, ctypes.c_size_t(len(texts))
    sampler, lib = ctypes.c_void_p(_make("dry", vocabulary.pointer, *values)), llama_cpp.library()
    for token in history:
        lib.llama_sampler_accept(sampler, ctypes.c_int32(token))
    tokens = (_Token * n_vocab)(*((i, 0.0, 0.0) for i in range(n_vocab)))
    lib.llama_sampler_apply(sampler, ctypes.byref(_Tokens(tokens, n_vocab, -1, False)))
    lib.llama_sampler_free(sampler)
    return {candidate.id: -candidate.logit for candidate in tokens if candidate.logit}
