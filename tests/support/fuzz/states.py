"""Damaged files of saved states."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from runners import F32, load_runner
from tiny_models import Tiny, write_tiny

from fuzz.damage import damaged
from fuzz.kind import Wrong
from vkbackend import LLM
from vkbackend.errors import StateError
from vkbackend.meta.gather import gather_rows
from vkbackend.models.engine.cache.blocks import SlotContent
from vkbackend.models.engine.runner import saved_state
from vkbackend.models.engine.runner.runner import Runner

TOKENS = list(range(1, 13))
N_CTX = 32
PIECES = (b'"resumable":"3",', b'"__metadata__":{', b"[0,0]", b'"F16"', b"[[[[", b"-1", b"1e99", b'"\xff"')


class States:
    """Either the file is refused and changes nothing, or the slot gets the saved tokens and caches."""

    deadline_s = 20.0

    def __init__(self, folder: Path) -> None:
        self._path = folder / "state"
        self._model = write_tiny(folder / "m.gguf", Tiny("llama", n_layer=2))
        with LLM(self._model, devices=["numpy"], n_ctx=N_CTX, **F32) as llm:
            llm.generate(TOKENS, 5, temperature=0, ignore_eos=True, slot=0)
            llm.save_state(self._path)
        self._whole = self._path.read_bytes()
        self._runner: Runner | None = None

    def make(self, rng: random.Random) -> bytes:
        return damaged(rng, self._whole, PIECES)

    def _caches(self, runner: Runner) -> list[np.ndarray]:
        rows = [
            gather_rows(runner.mesh.devices, cache, 0, N_CTX)
            for layer in runner.kv.layers
            for cache in (layer.k, layer.v)
        ]
        return [np.array(row) for row in rows]

    def check(self, case: bytes) -> str:
        if self._runner is None:
            self._runner = load_runner(self._model, devices=["numpy"], n_ctx=N_CTX, **F32)
            self._path.write_bytes(self._whole)
            content = SlotContent()
            saved_state.load(self._runner, self._path, 0, content)
            self._saved, self._content = self._caches(self._runner), content
        self._path.write_bytes(case)
        content = SlotContent()
        try:
            saved_state.load(self._runner, self._path, 0, content)
        except StateError:
            if content != SlotContent():
                raise Wrong("a refused file changed the slot") from None
        caches = self._caches(self._runner)
        if not all(np.array_equal(a, b) for a, b in zip(caches, self._saved, strict=True)):
            raise Wrong("the caches have other values")
        if content not in (SlotContent(), self._content):
            raise Wrong(f"the slot has other tokens: {content}")
        return "refused" if content == SlotContent() else "accepted"

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
