"""Damaged adapters: a GGUF file, or a file of a PEFT folder."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from adapters import random_pairs, write_adapter, write_peft
from oracles.fixtures import build

from fuzz.damage import damaged
from vkbackend.errors import VkbackendError
from vkbackend.models.adapters.gguf_adapter import read_gguf_adapter
from vkbackend.models.adapters.peft import read_peft_adapter

Q = "blk.0.attn_q.weight"
PEFT = ("adapter_model.safetensors", "adapter_config.json")
MODULE = "model.layers.0.self_attn.q_proj"
PIECES = (
    b'"use_rslora":true,',
    b'"alpha_pattern":{"q_proj":1e999},',
    b"[[[[",
    b"1e400",
    b"-1",
    b"NaN",
    b"null",
    b'"r":0,',
)


class Adapters:
    """A case is the name of a file, a line break, and its content."""

    deadline_s = 20.0

    def __init__(self, folder: Path) -> None:
        fixture = build("llama")
        pairs = {Q: random_pairs(fixture, 4)[Q]}
        self._file, self._folder = folder / "a.gguf", folder / "peft"
        self._sizes = fixture.n_layer, 0, fixture.keys["attention.key_length"]
        write_adapter(self._file, "llama", pairs)
        write_peft(self._folder, {f"{MODULE}.lora_A": pairs[Q][0], f"{MODULE}.lora_B": pairs[Q][1]})
        self._whole = {"a.gguf": self._file.read_bytes()}
        self._whole |= {name: (self._folder / name).read_bytes() for name in PEFT}

    def make(self, rng: random.Random) -> bytes:
        name = rng.choice(list(self._whole))
        return name.encode() + b"\n" + damaged(rng, self._whole[name], PIECES)

    def check(self, case: bytes) -> str:
        name, _, raw = case.partition(b"\n")
        path = self._folder / name.decode() if name.decode(errors="replace") in PEFT else self._file
        path.write_bytes(raw)
        try:
            if path == self._file:
                read_gguf_adapter(str(path), "llama")
            else:
                read_peft_adapter(str(self._folder), "llama", *self._sizes)
        except VkbackendError:
            return "refused"
        finally:
            path.write_bytes(self._whole[path.name])
        return "accepted"

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
