from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import device_infos
from llama_float64 import forward

from vkbackend.errors import InvalidArgument
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.perplexity import LEVELS, Base, Saving, Score, log_softmax, windows
from vkbackend.models.text.tokenizer import Tokenizer
from vkbackend.tools.cli import main

DEVICE = "0" if device_infos() else "numpy"
EXACT = ["-ctk", "f32", "-ctv", "f32"]


def perplexity(capsys: Any, models: Path, name: str, *flags: str) -> dict[str, Any]:
    path, text = models / f"stories-narrow-{name}.gguf", models / "stories.txt"
    code = main(["perplexity", "-m", str(path), "-f", str(text), "-dev", DEVICE, "--json", *flags])
    assert code == 0
    return dict(json.loads(capsys.readouterr().out))


def numpy_ppl(path: Path, text: str, n_ctx: int, n_windows: int) -> float:
    with GGUF.open(path) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)
    nll: list[float] = []
    for window in windows(tokenizer.encode(text), n_ctx, tokenizer.bos_id, n_windows):
        logp = log_softmax(forward(path, window))
        rows = np.arange(n_ctx // 2, n_ctx - 1)
        nll += (-logp[rows, np.array(window)[rows + 1]]).tolist()
    return math.exp(sum(nll) / len(nll))


def test_equals_a_numpy_forward(models: Path, capsys: Any) -> None:
    text = (models / "stories.txt").read_text(encoding="utf-8")
    want = numpy_ppl(models / "stories-narrow-F32.gguf", text, 128, 4)
    got = perplexity(capsys, models, "F32", "-c", "128", "--chunks", "4", *EXACT)
    assert got["tokens"] == 4 * 63 and abs(got["ppl"] / want - 1) < 1e-5
    halves = perplexity(capsys, models, "F32", "-c", "128", "--chunks", "4", "-ub", "48", *EXACT)
    assert abs(halves["ppl"] / want - 1) < 1e-5


@pytest.mark.wide
@pytest.mark.timeout(900)  # the test computes 264 windows three times, at 0.2 to 0.5 s per window
def test_the_whole_text(models: Path, capsys: Any) -> None:
    text = (models / "stories.txt").read_text(encoding="utf-8")
    want = numpy_ppl(models / "stories-narrow-F32.gguf", text, 512, 1 << 30)
    f32 = perplexity(capsys, models, "F32")
    q8_0 = perplexity(capsys, models, "Q8_0")
    assert abs(f32["ppl"] / want - 1) < 1e-3
    assert abs(q8_0["ppl"] / f32["ppl"] - 1) < 5e-3


def test_divergence_from_a_base(models: Path, capsys: Any, tmp_path: Path) -> None:
    base, window = str(tmp_path / "base.npy"), ["-c", "64", "--chunks", "2"]
    base_run = perplexity(capsys, models, "F32", *window, "--save-all-logits", base)
    same = perplexity(capsys, models, "F32", *window, "--kl-divergence-base", base)
    assert same["mean_kld"] < 1e-6 and same["same_top"] == 1
    assert same["base_ppl"] == pytest.approx(base_run["ppl"], rel=1e-3)
    other = perplexity(capsys, models, "Q4_0", *window, "--kl-divergence-base", base)
    assert other["mean_kld"] > 100 * abs(same["mean_kld"]) and other["same_top"] < 1


def test_differences_from_a_base_follow_the_definitions() -> None:
    rng, score = np.random.default_rng(), Score()
    logp, base = (log_softmax(rng.normal(0, 2, (40, 7)).astype(np.float32)) for _ in range(2))
    tokens = rng.integers(0, 7, 40)
    for begin in (0, 13):
        part = slice(begin, 13 if not begin else 40)
        score.add(logp[part], tokens[part].tolist(), base[part])
    divergence, rows = score.divergence_from_base(), np.arange(40)
    p, q = np.exp(logp), np.exp(base)
    klds = np.array([sum(q[i, t] * math.log(q[i, t] / p[i, t]) for t in range(7)) for i in rows])
    log_ratios = np.log(q[rows, tokens] / p[rows, tokens])
    same = p.argmax(1) == q.argmax(1)
    want = {
        "base_ppl": math.exp(-np.log(q[rows, tokens]).mean()),
        "ppl_ratio": math.exp(log_ratios.mean()),
        "ppl_ratio_error": math.exp(log_ratios.mean()) * log_ratios.std(ddof=1) / math.sqrt(40),
        "mean_kld": klds.mean(),
        "kld_error": klds.std(ddof=1) / math.sqrt(40),
        "max_kld": klds.max(),
        "kld_99_9": np.percentile(klds, 99.9),
        "median_kld": np.median(klds),
        "rms_dp": math.sqrt(((p - q)[rows, tokens] ** 2).mean()),
        "same_top": same.mean(),
        "same_top_error": same.std(ddof=1) / math.sqrt(40),
    }
    assert divergence == pytest.approx(want, rel=1e-9)


def test_a_full_disk(tmp_path: Path) -> None:
    logp = log_softmax(np.zeros((5, 3000), np.float32))
    import resource  # not on Windows

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with (
            pytest.raises(InvalidArgument, match="cannot be written"),
            Saving(tmp_path / "b", 5, 3000) as save,
        ):
            save(logp, [0] * 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_saved_rows_are_close_and_checked(tmp_path: Path) -> None:
    logp = log_softmax(np.random.default_rng().normal(0, 4, (5, 33)).astype(np.float32))
    path = tmp_path / "base.npy"
    with Saving(path, 5, 33) as save:
        save(logp[:2], [1, 2])
        save(logp[2:], [3, 4, 5])
    base = Base(path, 33)
    assert np.abs(base.rows(1, [2, 3]) - logp[1:3]).max() <= np.abs(logp).max() / LEVELS
    with pytest.raises(InvalidArgument, match="another text"):
        base.rows(1, [2, 4])
    with pytest.raises(InvalidArgument, match="34 tokens"):
        Base(path, 34)


@pytest.mark.parametrize(
    "flags",
    [
        ["-c", "3"],
        ["-c", "1000000"],
        ["--chunks", "0"],
        ["--kl-divergence-base", "/nowhere"],
        ["--save-all-logits", "/nowhere/base"],
    ],
    ids=" ".join,
)
def test_bad_flags_end_in_one_line(models: Path, capsys: Any, flags: list[str]) -> None:
    path, text = models / "stories-narrow-F32.gguf", models / "stories.txt"
    assert main(["perplexity", "-m", str(path), "-f", str(text), "-dev", "numpy", *flags]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_a_file_that_is_not_text_is_refused(models: Path, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"\xff\xfe\x00")
    model = str(models / "stories-narrow-F32.gguf")
    assert main(["perplexity", "-m", model, "-f", str(tmp_path / "raw"), "-dev", "numpy"]) == 2
    assert "UTF-8" in capsys.readouterr().err
