"""Makes `stories-narrow-eagle3.json`: how many tokens llama.cpp drafts and accepts with the trained head.

    PYTHONPATH=tests/support python tests/support/oracles/make_eagle3.py

Needs xllamacpp, llama.cpp's server for Python. The server decodes greedily, and always drafts.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from derived import eagle3_of, load, store
from places import DATA

MODEL, NAME = DATA / "stories-narrow-F16.gguf", "stories-narrow-eagle3"
PROMPTS = ["Once upon a time", "One day", "Mia was a small girl", "In a mill beside the river"]
N_TOKENS = 100
LENGTHS = 1, 3, 7


def counts(head: Path, n: int) -> list[list[int]]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = str(MODEL), 512, 1, 0
    params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
    params.speculative.draft.mparams.path, params.speculative.draft.n_max = str(head), n
    server, found = xllamacpp.Server(params), []
    for prompt in PROMPTS:
        asked = {"prompt": prompt, "n_predict": N_TOKENS, "temperature": 0, "cache_prompt": False}
        answer: Any = server.handle_completions(asked)
        timings = (answer if isinstance(answer, dict) else json.loads(answer))["timings"]
        found.append([timings["draft_n"], timings["draft_n_accepted"]])
    return found


def main() -> None:
    with TemporaryDirectory() as folder:
        head = store(Path(folder) / "head.gguf", eagle3_of(load(MODEL), DATA / f"{NAME}.npz"), "F16")
        about = f"xllamacpp {version('xllamacpp')}"
        made = {"made by": about, **{str(n): counts(head, n) for n in LENGTHS}}
    (DATA / f"{NAME}.json").write_text(json.dumps(made) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
