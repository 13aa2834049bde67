from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from device_sets import QUICKEST

from vkbackend.models.llm import LLM
from vkbackend.tools.cli import main
from vkbackend.tools.flags.text import demo_model

TEXTS = ["Once upon a time", "there was a girl"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["embedding", "-dev", *QUICKEST, "--pooling", "mean", *words])
    return code, *capsys.readouterr()


def test_formats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with LLM(demo_model(), devices=QUICKEST) as llm:
        expected = llm.embed(TEXTS, pooling="mean")
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    _, out, _ = run(capsys, "-f", str(file), "--embd-output-format", "json+")
    answer = json.loads(out)
    assert np.allclose([item["embedding"] for item in answer["data"]], expected, atol=1e-5)
    assert np.allclose(answer["cosineSimilarity"], expected @ expected.T, atol=1e-5)
    _, out, _ = run(capsys, "-p", "|".join(TEXTS), "--embd-separator", "|", "--embd-output-format", "array")
    assert np.allclose(json.loads(out), expected, atol=1e-5)
    _, out, _ = run(capsys, "-f", str(file), "--embd-output-format", "raw", "--embd-normalize", "-1")
    rows = np.loadtxt(io.StringIO(out))
    assert rows.shape == expected.shape and np.linalg.norm(rows[0]) > 1.1
    _, out, err = run(capsys, "-f", str(file))
    assert out.startswith("embedding 0:") and "cosine similarities" in out and "texts: 2" in err


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in [
        (("-p", ""), "no text to embed"),
        (("-p", "a", "--embd-separator", ""), "--embd-separator is empty"),
        (("-p", "a", "--embd-normalize", "-2"), "normalize"),
        (("-p", "dog " * 900), "tokens, at most"),
        (("-p", "a", "--pooling", "rank"), "no classification head"),
    ]:
        code, _, err = run(capsys, *words)
        assert code == 2 and message in err.splitlines()[-1], err
