"""Makes `golden/encoders.npz`, the hidden states of the fixtures in encoders.py.

    PYTHONPATH=tests/support python tests/support/oracles/make_encoders.py

Needs torch, transformers and xllamacpp. The states come from transformers, or from llama.cpp for families
that transformers lacks. Both programs must agree.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from oracles import hf, hf_encoders, llama_cpp
from oracles.encoders import BUILDERS, build
from oracles.fixture import PROMPT, Fixture, write
from oracles.make_golden import nmse
from places import GOLDEN

N_FIRST = 20  # number of tokens of a pair's first text
# llama.cpp's GELU uses an F16 table.
BOUND, WITH_GELU = 1e-10, 1e-6
SILU = "nomic-bert", "eurobert", "neo-bert", "llama+encoder"


def by_llama_cpp(fixture: Fixture) -> np.ndarray:
    fixture.keys["pooling_type"] = 0
    for name in [name for name in fixture.tensors if name.startswith(("cls", "dense"))]:
        del fixture.tensors[name]
    with tempfile.TemporaryDirectory() as folder:
        path = write(fixture, Path(folder) / "model.gguf")
        return llama_cpp.hidden(path, PROMPT, fixture.keys["embedding_length"])


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    about: dict[str, dict[str, object]] = {}
    for name in BUILDERS:
        theirs = by_llama_cpp(build(name))
        if name not in hf_encoders.MODELS:
            arrays[name], about[name] = theirs, {"made by": llama_cpp.versions()}
            continue
        outputs = hf_encoders.hidden(build(name))
        apart = nmse(theirs, outputs["hidden"])
        assert apart <= (BOUND if name in SILU else WITH_GELU), f"{name}: NMSE {apart:.1e}"
        arrays[name] = outputs["hidden"]
        if "logits" in outputs:
            arrays[f"{name} logits"] = outputs["logits"]
        nmse_of = float(f"{apart:.1e}")
        about[name] = {"made by": hf.versions(), "agrees with": llama_cpp.versions(), "nmse": nmse_of}
    types = [0] * N_FIRST + [1] * (len(PROMPT) - N_FIRST)
    arrays["bert pair"] = hf_encoders.hidden(build("bert"), types)["hidden"]
    np.savez_compressed(GOLDEN / "encoders.npz", about=json.dumps(about), **arrays)
    for name, facts in about.items():
        print(f"{name:16} {facts}")


if __name__ == "__main__":
    main()
