from __future__ import annotations

import csv
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import device_infos, some
from fake_llama_cpp import install
from runners import load_runner

from vkbackend import shaderlib
from vkbackend.errors import InvalidArgument
from vkbackend.formats import dequantize
from vkbackend.meta.known_speed import key_of, remember
from vkbackend.meta.learned_times import known_tokens
from vkbackend.models.architectures.weight_specs import MATRIX_TYPES
from vkbackend.models.gguf.reader import GGUF
from vkbackend.step import Run
from vkbackend.tools import verify
from vkbackend.tools.cli import main
from vkbackend.tools.measure import synthetic
from vkbackend.tools.measure.synthetic import Synthetic
from vkbackend.twins.device import NumpyDevice

needs_device = pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")
TINY = ("llama", 96, False, synthetic._dense(2, 256, 4, 2, 64, 512))
TINY_EXPERTS = (
    "qwen3moe",
    96,
    True,
    synthetic._mixture(8, 2, 256, **synthetic._dense(2, 256, 4, 2, 64, 512)),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "tiny", TINY)
    monkeypatch.setitem(synthetic.SHAPES, "tiny-experts", TINY_EXPERTS)


def bench(capsys: Any, *flags: str, command: str = "bench") -> str:
    assert main([command, "-dev", "numpy,numpy", *flags]) == 0
    return str(capsys.readouterr().out)


def test_rows_in_every_format(models: Path, capsys: Any) -> None:
    model = str(models / "stories-narrow-Q8_0.gguf")
    flags = ["-m", model, "-p", "6", "-n", "3", "-d", "0,5", "-pg", "4,2", "-r", "2"]
    rows = json.loads(bench(capsys, *flags, "-o", "json"))
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"]) for r in rows] == [
        (p, n, d) for d in (0, 5) for p, n in ((6, 0), (0, 3), (4, 2))
    ]
    for row in rows:
        assert len(row["samples_ns"]) == 2 and row["us_per_reduce"] > 0
        assert row["model_size"] / row["load_bytes_per_s"] < row["load_s"] and row["read_bytes_per_s"] > 0
        n_tokens = row["n_prompt"] + row["n_gen"]
        assert row["avg_ts"] == pytest.approx(
            np.mean([1e9 * n_tokens / ns for ns in row["samples_ns"]]), rel=1e-3
        )
        assert (row["weight_bytes_per_s"] is None) == (row["n_prompt"] > 0)
    few = [*flags[:2], "-p", "0", "-n", "1", "-d", "0", "-d", "5", "-r", "1"]
    assert [json.loads(line)["n_depth"] for line in bench(capsys, *few, "-o", "jsonl").splitlines()] == [0, 5]
    table = list(csv.DictReader(io.StringIO(bench(capsys, *flags[:6], *flags[8:], "-o", "csv"))))
    assert [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in table] == [
        (p, n, "0") for p, n in (("6", "0"), ("0", "3"), ("4", "2"))
    ]
    for row in table:
        n_tokens = int(row["n_prompt"]) + int(row["n_gen"])
        average, stddev = float(row["avg_ts"]), float(row["stddev_ts"])
        # The tokens divided by the mean time of the two repetitions are the harmonic mean of their rates.
        harmonic = average - stddev**2 / (2 * average)
        assert harmonic == pytest.approx(1e9 * n_tokens / int(row["avg_ns"]), rel=1e-3)
        assert row["devices"] == row["drivers"] == "numpy.0/numpy.1"
    text = bench(capsys, *flags)
    tests = ["pp6", "tg3", "pp4+tg2", "pp6 @ d5", "tg3 @ d5", "pp4+tg2 @ d5"]
    assert [line.split(" | ")[8] for line in text.splitlines() if line.startswith("| llama ")] == tests
    assert "build: vkbackend" in text


def test_predictions_learn_from_measured_tokens(
    models: Path, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor whose speed is unknown is not measured, so the first prediction excludes the layers."""
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    flags = ["-m", str(models / "stories-narrow-Q8_0.gguf"), "-p", "0", "-n", "3", "-r", "1", "-o", "json"]
    assert json.loads(bench(capsys, *flags))[0]["predicted_ts"] is None
    device = NumpyDevice("numpy")
    remember(f"speed {key_of(device)}", [1e12, 1e12])
    for names in ("numpy", "numpy,numpy"):
        first, second = (json.loads(bench(capsys, *flags, "-dev", names))[0] for _ in range(2))
        if names == "numpy":
            assert first["predicted_ts"] > 10 * first["avg_ts"]  # 1 TB/s is more than numpy reaches
        # The learned time is at least 0, so a group that is faster than predicted changes nothing.
        slower = min(first["avg_ts"], first["predicted_ts"])
        assert second["predicted_ts"] == pytest.approx(slower, rel=0.05)
    assert len(known_tokens([device])) == len(known_tokens([device] * 2)) == 2


def test_weight_rate_counts_the_bytes_of_a_token(models: Path, capsys: Any) -> None:
    model = models / "stories-moe8x-Q4_0.gguf"
    [row] = json.loads(bench(capsys, "-m", str(model), "-p", "0", "-n", "2", "-r", "1", "-o", "json"))
    nbytes = row["weight_bytes_per_s"] * row["samples_ns"][0] / 2e9
    assert 0 < nbytes < row["model_size"]


@needs_device
def test_sweep(models: Path, capsys: Any) -> None:
    model = str(models / "stories-narrow-Q8_0.gguf")
    flags = ["-m", model, "-p", "16", "-n", "4", "-c", "52", "-o", "json"]
    assert main(["sweep", "-dev", "0", *flags]) == 0
    points = json.loads(capsys.readouterr().out)
    assert [p["depth"] for p in points] == [0, 16, 32] and all(p["pp"] > 0 < p["tg"] for p in points)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_sweep_draws(models: Path, capsys: Any, tmp_path: Path) -> None:
    picture = tmp_path / "rates.svg"
    model = str(models / "stories-narrow-Q8_0.gguf")
    bench(capsys, "-m", model, "-p", "4", "-n", "2", "-c", "12", "--plot", str(picture), command="sweep")
    assert "</svg>" in picture.read_text(encoding="utf-8")
    for wrong in (tmp_path / "rates.gguf", tmp_path / "nowhere" / "rates.svg"):
        assert main(["sweep", "-m", model, "-dev", "numpy", "--plot", str(wrong)]) == 2
        assert str(wrong) in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_sweep_prints_the_data_for_a_plot(models: Path, capsys: Any) -> None:
    model = str(models / "stories-narrow-Q8_0.gguf")
    assert main(["sweep", "-m", model, "-dev", "numpy", "--plot", "x.svg"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", some(MATRIX_TYPES, 3))
def test_synthetic_weights_are_finite_and_of_the_type(tiny: None, dtype: str) -> None:
    model = Synthetic(f"tiny:{dtype}")
    for info in model.tensors.values():
        raw = model.data(info.name)
        assert raw.nbytes == info.nbytes
        values = dequantize(raw, info.type, info.shape)
        assert np.isfinite(values).all() and 0 < np.abs(values).max() <= 1
    assert model.tensors["blk.0.ffn_up.weight"].type == dtype
    assert model.data("blk.1.attn_q.weight").tobytes() == model.data("blk.1.attn_q.weight").tobytes()


@pytest.mark.parametrize("spec", ["tiny:q4_0", "tiny-experts:q8_0"])
def test_synthetic_models_run(tiny: None, spec: str) -> None:
    runner = load_runner(Synthetic(spec), devices=["numpy", "numpy"], n_ctx=32, n_ubatch=4)
    logits = runner.step([1, 2, 3], [Run(0, 0, 3, 0)], [2])
    assert np.isfinite(logits).all() and np.ptp(logits) > 0
    runner.close()


def test_shapes_have_the_published_sizes() -> None:
    for spec, billions in (
        ("llama-8b:Q4_0", 8.03), ("llama-70b:Q4_0", 70.55), ("qwen3-0.6b:Q4_0", 0.596),
        ("qwen3-30b-a3b:Q8_0", 30.53), ("llama-1b:F16", 1.236),
    ):  # fmt: skip
        infos = Synthetic(spec).tensors.values()
        assert sum(int(np.prod(i.shape)) for i in infos) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("spec", ["llama-9b:Q4_0", "llama-8b", "llama-8b:Q9_9", ""])
def test_unknown_synthetic_models_are_refused(spec: str) -> None:
    with pytest.raises(InvalidArgument, match=r"SHAPE:TYPE.*llama-8b"):
        Synthetic(spec)


def test_a_synthetic_model_acts_like_a_file(tiny: None, capsys: Any, tmp_path: Path) -> None:
    path, synthetic = tmp_path / "tiny.gguf", Synthetic("tiny-experts:q8_0")
    path.write_text("what was there before", encoding="utf-8")
    assert main(["export", "--synthetic", "tiny-experts:q8_0", "-o", str(path)]) == 0
    with GGUF.open(path) as gguf:
        assert dict(gguf.metadata) == dict(synthetic.metadata)
        assert list(gguf.tensors) == list(synthetic.tensors)
        for name in synthetic.tensors:
            assert gguf.data(name).tobytes() == synthetic.data(name).tobytes()
    logits = []
    for model in (path, synthetic):
        runner = load_runner(model, devices=["numpy"], n_ctx=32, n_ubatch=4)
        logits.append(runner.step([1, 2, 3], [Run(0, 0, 3, 0)], [2]).copy())
        runner.close()
    assert (logits[0] == logits[1]).all()


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["-p", "0", "-n", "0"],
        ["-p", "x"],
        ["-pg", "5"],
        ["-r", "0"],
        ["--compare", "llama-cpp"],
        ["--compare", "llama-cpp", "--control-vector", "happy.gguf"],
        ["--compare", "llama-cpp", "-ot", "ffn=CPU"],
    ],
    ids=" ".join,
)
def test_bad_flags_end_in_one_line(tiny: None, capsys: Any, flags: list[str]) -> None:
    model = ["--synthetic", "tiny:f32"] if flags else []
    assert main(["bench", "-dev", "numpy", *model, *flags]) == 2
    out, err = capsys.readouterr()
    assert not out and err.splitlines()[-1].startswith("error: ")
    if {"--control-vector", "-ot"} & set(flags):
        assert "leave one of them out" in err


@needs_device
def test_llama_cpp_runs_the_same_in_turn(
    tiny: None, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vkbackend.vulkan.instance import position

    calls_of = install(tmp_path, monkeypatch)
    flags = "--synthetic tiny:q8_0 -dev 0 -p 6 -n 2 -d 5 -r 2 -ngl 2 -nkvo -ub 4 --compare llama-cpp -o json"
    assert main(["bench", *flags.split()]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["ratio"] == pytest.approx(row["avg_ts"] / row["llama_cpp_avg_ts"]) for row in rows)
    loaded, context, *calls = calls_of()
    visible = str(position(device_infos()[0]))
    assert loaded == {"magic": "GGUF", "visible": visible, "n_gpu_layers": 2, "split_mode": 0}
    assert context["offload_kqv"] is False and (context["n_ubatch"], context["n_ctx"]) == (4, 11)
    once = [4, 1, 4, 2], [4, 1, 1, 1]
    assert [call["decode"] for call in calls] == [*(once[0] * 3), *(once[1] * 3)]


@pytest.mark.parametrize("flags", [[], ["-p", "0"], ["-c", "8"], ["-dev", "nothing"]], ids=" ".join)
def test_bad_flags_of_a_sweep_leave_stdout_empty(tiny: None, capsys: Any, flags: list[str]) -> None:
    model = ["--synthetic", "tiny:f32"] if flags else []
    assert main(["sweep", "-dev", "numpy", *model, *flags]) == 2
    assert not capsys.readouterr().out


@needs_device
def test_verify_reports_passed_cases(capsys: Any) -> None:
    assert main(["verify", "-dev", "0", "-c", "^(Rope|Add)\\(", "--json", "--seed", "7"]) == 0
    report = json.loads(capsys.readouterr().out)
    results = {row["shader"]: row for row in report["results"]}
    assert report["seed"] == 7 and report["devices"][0]["driver"]
    assert results["rope.f32"]["result"] == "pass" and 0 < results["rope.f32"]["worst"] <= 1e-10
    assert results["mat_mul.q8_0"]["result"] == "skipped"


@needs_device
def test_verify_says_why_variants_were_skipped(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "CASES", [case for case in verify.CASES if repr(case).startswith("Add(n=1)")])
    assert main(["verify", "-dev", "0"]) == 0
    *_, last = lines = capsys.readouterr().out.splitlines()
    n = len(list(shaderlib.variants()))
    assert last == f"shader variants on 1 devices: 1 pass, 0 FAIL, {n - 1} skipped"
    reasons = {line.split(": ")[0] for line in lines if " skipped " in line}
    assert any("no case used them here" in reason for reason in reasons)
    lacking = "matrix_units" not in device_infos()[0].features
    assert any("it lacks" in reason and "matrix_units" in reason for reason in reasons) == lacking


@needs_device
def test_verify_finds_a_wrong_twin(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vkbackend import twins

    twin = twins.elementwise.add

    def off_by_one(a: np.ndarray, b: np.ndarray, y: np.ndarray, **push: Any) -> None:
        twin(a, b, y, **push)
        y.flat[0] += 1

    monkeypatch.setattr(twins.elementwise, "add", off_by_one)
    twins.twin_of.cache_clear()
    try:
        assert main(["verify", "-dev", "0", "-c", "^Add\\("]) == 1
    finally:
        twins.twin_of.cache_clear()
    assert "FAIL" in capsys.readouterr().out
