"""Trained models reproduce llama.cpp's results through the public interface, on every device set."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from device_sets import DEVICE_SETS, covering, for_every_runtime, nmse, wide
from material import DATA, SHARED_MODELS
from places import ROOT, SHARED

from vkbackend import LLM

FILES = [f"stories-narrow-{t}" for t in ("F32", "F16", "Q8_0", "Q4_0")]
SETS = [for_every_runtime(p) if p.id == "0,0" else p for p in DEVICE_SETS]
CHECK = SHARED / "oracles" / "check_models.py"


@pytest.mark.parametrize(
    ("devices", "name"),
    [p if p.id.startswith("0,0-") else wide(p) for p in covering(SETS, FILES)],
)
def test_files(models: Path, name: str, devices: list[str]) -> None:
    """llama.cpp rounds activations to 8 bits. In the files of this test, the best token leads by more than
    llama.cpp's rounding error."""
    expected = json.loads((models / "expected.json").read_text(encoding="utf-8"))[name]
    want = np.load(models / "expected_logits.npz")[name]
    exact = name.endswith(("F32", "F16"))
    with LLM(models / f"{name}.gguf", devices=devices, n_ctx=128) as llm:
        assert llm.tokenize(expected["prompt"]) == expected["prompt_tokens"]
        assert nmse(llm.logits(expected["prompt_tokens"]), want) <= (1e-5 if exact else 5e-4)
        assert expected["min_margin"] > 0.1
        answer = llm.generate(expected["prompt"], max_tokens=len(expected["greedy_tokens"]), temperature=0)
        assert (answer.tokens, answer.text) == (expected["greedy_tokens"], expected["greedy_text"])


if CHECK.is_file():
    # The wide cases open 4 or 16 files. By default, one case with one file runs, because test_files above
    # covers each device set and each format.
    @pytest.mark.parametrize("devices", [p if p.id == "0" else wide(p) for p in DEVICE_SETS])
    @pytest.mark.parametrize(
        ("folder", "only", "n"),
        [
            wide(pytest.param(DATA, ".", 16, id="own")),
            wide(pytest.param(SHARED_MODELS, "^stories260K-(F32|F16|Q8_0|Q4_0)$", 4, id="shared")),
            pytest.param(SHARED_MODELS, "^stories260K-Q8_0$", 1, id="one"),
        ],
    )
    def test_check_models(folder: Path, only: str, n: int, devices: list[str]) -> None:
        words = [str(folder), "--devices", ",".join(devices), "--only", only, "--nmse", "1e-5"]
        result = subprocess.run(
            [sys.executable, str(CHECK), *words, "--nmse-quant", "2e-3"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=110,
        )
        assert result.returncode == 0 and f"{n} of {n} hold" in result.stdout, result.stdout + result.stderr
