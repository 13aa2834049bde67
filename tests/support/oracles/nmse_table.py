"""Prints the NMSE of every architecture against its golden logits as a Markdown table.

    PYTHONPATH=tests/support python tests/support/oracles/nmse_table.py [NAME ...]  # Prints it.

The last tokens of the prompt are computed one by one. Caches, sums and the wire are F32.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from device_sets import nmse
from oracles.fixture import N_CTX, N_PREFILL, PROMPT, write
from oracles.fixtures import FIXTURES, build
from places import GOLDEN
from runners import load_runner

from vkbackend.step import Run

SETS = {"numpy": ["numpy"], "numpy x 3": ["numpy"] * 3, "0,0,0": ["0"] * 3, "0,1": ["0", "1"]}


def logits(path: Path, devices: list[str]) -> np.ndarray:
    """Return the logits of the prompt, [len(PROMPT), n_vocab]."""
    how = {"type_k": "f32", "type_v": "f32", "reduce_type": "f32"}
    runner = load_runner(path, devices=devices, n_ctx=N_CTX, n_ubatch=N_CTX, **how)
    try:
        rows = [runner.step(PROMPT[:N_PREFILL], [Run(0, 0, N_PREFILL, 0)], range(N_PREFILL)).copy()]
        for i in range(N_PREFILL, len(PROMPT)):
            rows.append(runner.step([PROMPT[i]], [Run(0, 0, 1, i)], [0]).copy())
        return np.concatenate(rows)
    finally:
        runner.close()


def main() -> None:
    print("| " + " | ".join(["model", "the golden logits agree with", "NMSE of these", *SETS]) + " |")
    print("|---|---|---:|" + "---:|" * len(SETS))
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or FIXTURES:
            golden = np.load(GOLDEN / f"{name}.npz")
            about = json.loads(str(golden["about"]))
            path = write(build(name), Path(folder) / "model.gguf")
            errors = [f"{nmse(logits(path, devices), golden['logits']):.1e}" for devices in SETS.values()]
            apart = f"{max(map(float, about['nmse'])):.1e}" if about["nmse"] else "-"
            print("| " + " | ".join([name, about["agrees with"], apart, *errors]) + " |", flush=True)


if __name__ == "__main__":
    main()
