"""Makes `golden/long_prompts.npz`, logits in some rows of a prompt with two complete blocks of 128
positions. transformers and llama.cpp must agree on them.

    PYTHONPATH=tests/support python tests/support/oracles/make_long_prompt.py

Needs torch, transformers and xllamacpp.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from oracles import hf, llama_cpp
from oracles.fixture import N_VOCAB, write
from oracles.fixtures import build
from oracles.make_golden import nmse
from places import GOLDEN

NAME, AGREE = "deepseek4", 1e-10
TOKENS = np.random.default_rng(300).integers(0, N_VOCAB, 300).tolist()
TOP_K = 100  # all blocks, because the programs choose differently among blocks of score 0
ROWS = (100, 126, 127, 128, 191, 254, 255, 256, 299)


def main() -> None:
    # llama.cpp's n_ctx, n_batch and n_ubatch
    llama_cpp.CONTEXT |= {offset: (llama_cpp.CONTEXT[offset][0], 512) for offset in (0, 4, 8)}
    fixture = build(NAME)
    fixture.keys["attention.indexer.top_k"] = TOP_K
    ours = hf.logits(fixture, [TOKENS])
    with tempfile.TemporaryDirectory() as folder:
        theirs = llama_cpp.logits(write(fixture, Path(folder, "model.gguf")), [TOKENS], N_VOCAB)
    apart = nmse(theirs, ours)
    assert apart <= AGREE, f"NMSE {apart:.1e}"
    about = {"made by": hf.versions(), "agrees with": llama_cpp.versions(), "nmse": float(f"{apart:.1e}")}
    np.savez_compressed(
        GOLDEN / "long_prompts.npz",
        **{NAME: ours[list(ROWS)], "tokens": TOKENS, "rows": ROWS, "about": json.dumps(about)},
    )
    print(about)


if __name__ == "__main__":
    main()
