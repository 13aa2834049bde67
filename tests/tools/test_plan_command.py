"""The plan command predicts how a model loads: its slices, bytes and all-reduces."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from device_sets import wide
from oracles.encoders import build
from oracles.fixture import write
from runners import load_runner
from tiny_vision import write_projector

from vkbackend.buffer import Home
from vkbackend.meta import speed
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.placement import fit
from vkbackend.models.placement.host_limits import HostLimit
from vkbackend.models.placement.memory_report import HOMES, ITEMS
from vkbackend.models.vision.projector import Projector
from vkbackend.tools import cli

DENSE, MOE, QWEN2 = (f"stories-{name}.gguf" for name in ("wide-Q8_0", "moe8x-Q4_0", "qwen2-Q8_0"))


@pytest.fixture(autouse=True)
def known_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    monkeypatch.setattr(speed, "_read_rate", lambda device, home: 1e9 if home is Home.WEIGHTS else 1e8)
    monkeypatch.setattr("vkbackend.meta.rates.measure_reduce", lambda devices, n: 1e-4 * (len(devices) > 1))


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert cli.main(["plan", "--json", *args]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "split", "flags", "options"),
    [
        (DENSE, (3.0, 1.0), (), {}),
        wide(pytest.param(DENSE, (1.0, 1.0, 1.0, 1.0, 1.0), (), {})),
        wide(pytest.param(DENSE, (1.0, 2.0), ("-ngl", "2"), {"n_gpu_layers": 2})),
        (DENSE, (1.0, 1.0), ("-nkvo", "-ot", "ffn=CPU"), {"kv_offload": False, "ffn": True}),
        wide(pytest.param(DENSE, (1.0, 1.0), ("-sm", "layer"), {"split_mode": "layer"})),
        (MOE, (5.0, 3.0, 2.0), (), {}),
        (QWEN2, (1.0, 3.0), ("--split-policy", "llama.cpp"), {"split_policy": "llama.cpp"}),
    ],
)
def test_plan_equals_loading(
    model: str,
    split: tuple[float, ...],
    flags: tuple[str, ...],
    options: dict[str, Any],
    models: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, n = str(models / model), len(split)
    devices = ",".join(["numpy"] * n)
    shares = ",".join(map(str, split))
    report = plan(capsys, "-m", path, "-dev", devices, "-ts", shares, "-c", "64", *flags)
    if options.pop("ffn", False):
        options["override_tensor"] = (("ffn", "CPU"),)
    runner = load_runner(path, devices=["numpy"] * n, tensor_split=split, n_ctx=64, n_ubatch=1, **options)
    try:
        layout, mesh = runner.layout, runner.mesh
        for line, real in zip(report["plan"], [*layout.plans, layout.output_plan], strict=True):
            assert all(line[dim] == [list(r) for r in ranges] for dim, ranges in real.ranges.items())
        for row, device in zip(report["devices"], mesh.devices, strict=True):
            for home in (Home.WEIGHTS, Home.KV, Home.HOST):
                assert device.nbytes[home] == row[home.value]
        real_reduces = mesh.recorded_step(StepKind.of_run(1, 1)).reduces
        assert report["traffic"]["reduces"] == len(real_reduces)
        assert report["traffic"]["bytes"] == sum(4 * r.elements for r in real_reduces)
    finally:
        runner.close()
    totals = report["totals"]
    assert totals["held"] == sum(row[home] for row in report["devices"] for home in HOMES)
    assert totals["held"] == sum(totals[item] for item in ITEMS)
    assert totals["padding"] == sum(row["padding"] for row in report["devices"]) > 0


# 600 tokens are more than a step of 512 rows holds, but an encoder's step holds them
@pytest.mark.parametrize("n_ctx", [64, 600])
def test_plan_equals_loading_of_an_encoder(
    n_ctx: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "encoder.gguf"
    write(build("nomic-bert"), path)
    report = plan(capsys, "-m", str(path), "-dev", "numpy,numpy", "-ts", "3,1", "-c", str(n_ctx), "--fit")
    runner = load_runner(path, devices=["numpy"] * 2, tensor_split=[3, 1], n_ctx=n_ctx)
    assert report["notes"][-1] == "fit: nothing was left to choose"
    held = [device.nbytes.copy() for device in runner.mesh.devices]
    runner.close()
    for row, real in zip(report["devices"], held, strict=True):
        assert all(row[home.value] == real[home] for home in (Home.WEIGHTS, Home.KV, Home.SCRATCH))


def test_prediction_adds_up(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(models / DENSE)
    report = plan(capsys, "-m", path, "-dev", "numpy,numpy", "-ngl", "3")
    p, rows = report["prediction"], report["devices"]
    assert p["tensor_split"] == [16, 16], "equal devices"
    assert report["traffic"]["reduces"] == 10 and p["reduce_ms"] == pytest.approx(1.0)
    assert p["weights_ms"] == pytest.approx(sum(row["read_per_token"] for row in rows) / 1e6)
    assert (
        p["host_ms"] == pytest.approx(sum(row["host_read_per_token"] for row in rows) / 1e5) and p["host_ms"]
    )
    assert p["total_ms"] == pytest.approx(p["weights_ms"] + p["host_ms"] + p["reduce_ms"])
    assert len(p["fewer"]) == 1 and p["fewer_total_ms"] < p["total_ms"], "one does without reduces"


def test_assumed_cards_of_different_speeds(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first card reads twice as fast, so it gets two thirds of the weights."""
    command = ["-m", str(models / DENSE), "-dev", "numpy,numpy"]
    command += ["--bus-gb-per-s", "12", "--exchange-us", "83"]
    alike = plan(capsys, *command, "--gb-per-s", "2e-3")["prediction"]
    assert alike["tensor_split"] == [16, 16]
    p = plan(capsys, *command, "-ts", "auto", "--gb-per-s", "2e-3,1e-3")["prediction"]
    assert p["tensor_split"] == [16, 8] and not p["fewer"] and p["alone"].endswith("0")
    assert 1.25 < p["alone_total_ms"] / p["total_ms"] < 1.5 and 1.25 < p["total_ms"] / alike["total_ms"] < 1.5
    p = plan(capsys, *command, "-ts", "auto", "--gb-per-s", "600,300")["prediction"]
    assert p["fewer"] == [p["alone"]] and p["break_even_us"] < 83


@pytest.mark.wide
def test_the_gain_of_drafts_on_assumed_cards(capsys: pytest.CaptureFixture[str]) -> None:
    """Values computed by hand: 8B in Q4_K reads 2,014 MiB per card, and each of 64 exchanges has 16 KiB."""
    command = ["--synthetic", "llama-8b:Q4_K", "-dev", "numpy,numpy", "--spec-type", "ngram"]
    speeds = ["--gb-per-s", "400", "--bus-gb-per-s", "12", "--exchange-us", "30,300"]
    report = plan(capsys, *command, *speeds, "--draft-accept", "0.7", "--draft-max", "3")
    weights, exchanges = 2013.9 * 2**20 / 400e6, 64 * 16384 / 12e6
    assert report["prediction"]["weights_ms"] == pytest.approx(weights, rel=1e-4)
    assert report["prediction"]["reduce_ms"] == pytest.approx(64 * 0.03 + exchanges, rel=1e-3)
    tokens = {1: 1.7, 3: 1 + 0.7 + 0.7**2 + 0.7**3}
    gains = report["draft"]["gains"]
    assert [(round(g["exchange_us"]), g["n_drafted"]) for g in gains] == [
        (30, 1),
        (30, 3),
        (300, 1),
        (300, 3),
    ]
    for gain in gains:
        n, fixed = gain["n_drafted"], 64e-3 * gain["exchange_us"]
        verify = weights * (1 + 0.03 * n) + fixed + exchanges * (1 + n)
        assert gain["token_ms"] == 0
        assert gain["speed_up"] == pytest.approx(tokens[n] * (weights + fixed + exchanges) / verify, rel=1e-3)


def test_a_draft_model_lowers_the_gain(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, draft = (str(models / f"stories-{name}-F16.gguf") for name in ("w256", "narrow"))
    command = ["-m", path, "-dev", "numpy,numpy", "--gb-per-s", "1", "--bus-gb-per-s", "1"]
    free = plan(capsys, *command, "--exchange-us", "100", "--spec-type", "ngram")["draft"]
    drafted = plan(capsys, *command, "--exchange-us", "100", "-md", draft)["draft"]
    assert not free["devices"] and list(drafted["devices"]) == ["numpy"]
    for with_model, without in zip(drafted["gains"], free["gains"], strict=True):
        assert with_model["token_ms"] > 0 and 0 < with_model["speed_up"] < without["speed_up"]
    assert cli.main(["plan", *command, "-md", draft]) == 0
    text = capsys.readouterr().out
    assert "predicted speed-up by drafts" in text and "7 drafted" in text


def test_a_projector_is_planned_on_its_device(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    projector = write_projector(tmp_path / "mmproj.gguf", 64)
    command = ["-m", str(models / "stories-narrow-F16.gguf"), "-dev", "numpy", "--mmproj", str(projector)]
    planned = plan(capsys, *command, "--mmproj-device", "none")["projector"]
    [device] = open_devices(["numpy"])
    with Projector.open(projector, device) as opened:
        row = opened.memory()
    homes = "weights", "kv", "scratch", "staging"
    assert planned == {"device": "numpy", **{h: row[h] for h in homes}, "held": sum(row[h] for h in homes)}
    assert cli.main(["plan", *command]) == 0
    assert "projector in MiB" in capsys.readouterr().out


def test_host_memory_of_a_projector_is_not_left_to_the_model(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    projector = write_projector(tmp_path / "mmproj.gguf", 64)
    command = ["-m", str(models / "stories-narrow-F16.gguf"), "-dev", "numpy", "-ngl", "0", "-c", "64"]
    [row] = plan(capsys, *command)["devices"]
    nbytes = int((row["host"] + row["staging"] + (300 << 10)) / (1 - fit.RESERVE))
    monkeypatch.setattr(fit, "least_host_limit", lambda: HostLimit("available", nbytes))
    assert plan(capsys, *command)["fits"]
    assert cli.main(["plan", "--json", *command, "--mmproj", str(projector)]) == 1
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert re.search(r"host memory \(available\) would hold .* besides .* MiB of the projector", advice)


def test_tensors_placed_on_a_device_count_without_a_share(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(models / DENSE)
    command = ["-m", path, "-dev", "numpy,numpy", "-ts", "1,1", "-ot", "blk=1"]
    p = plan(capsys, *command)["prediction"]
    alone = plan(capsys, "-m", path, "-dev", "numpy")["prediction"]
    assert p["fewer"] and p["fewer_total_ms"] >= 0.99 * alone["total_ms"]


def test_a_token_reads_the_experts_it_uses(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [row] = plan(capsys, "-m", str(models / MOE), "-dev", "numpy")["devices"]
    assert row["read_per_token"] < row["weights"] / 2


def test_larger_steps_read_fewer_bytes_over_the_bus(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A token reads 2 of 8 experts. A step of 512 rows or more reads all experts."""
    path = str(models / MOE)
    report = plan(capsys, "-m", path, "-dev", "numpy,numpy", "-ts", "3,1", "-cmoe", "-ub", "1024")
    experts = [row["host"] for row in report["devices"]]
    assert experts[0] > 2 * experts[1] > 0
    for row, nbytes in zip(report["bus"], experts, strict=True):
        assert row["token"] == pytest.approx(nbytes / 4, rel=0.02)
        assert list(row["prompt"]) == ["512", "1024", "2048", "4096"]
        assert all(n == pytest.approx(nbytes / int(rows), rel=0.02) for rows, n in row["prompt"].items())
    assert not plan(capsys, "-m", path, "-dev", "numpy")["bus"]
    assert cli.main(["plan", "-m", path, "-dev", "numpy", "-cmoe"]) == 0
    assert "over the bus" in capsys.readouterr().out


def test_text(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(models / DENSE)
    assert cli.main(["plan", "-m", path, "-dev", "numpy,numpy", "-ts", "3,1", "-c", "64"]) == 0
    text = capsys.readouterr().out
    for part in (
        "blk.0..4",
        "output",
        "0:384",
        "384:512",
        "numpy.0",
        "split 3,1",
        "ms per token",
        "10 exchanges",
    ):
        assert part in text, (part, text)


def test_model_that_does_not_fit(models: Path, capsys: pytest.CaptureFixture[str], device: object) -> None:
    info = device.info  # type: ignore[attr-defined]
    path, index = str(models / DENSE), str(info.index)
    command = ["plan", "-m", path, "-dev", index, "-c", "16000000", "-ctk", "f32", "-ctv", "f32"]
    assert cli.main(command) == 1
    assert "does not fit: " in (text := capsys.readouterr().out) and "-c " in text
    assert cli.main([*command, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["fits"] and info.name in report["advice"]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("-ts", "1,2,3"), "3 shares"),
        (("-ts", "x,1"), "'x'"),
        (("--split-policy", "fair"), "fair"),
        (
            ("-ot", "nothing=CPU"),
            "nothing=CPU: no tensor's name matches the pattern; names look like output",
        ),
        (("-ctk", "q3"), "q3"),
        (("-c", "-1"), "-1"),
        (("-ts", "nan,1"), "nan"),
        (("-ts", "1,inf"), "inf"),
        (("-ts", "-1,2"), "-1"),
        (("-ts", "0,0"), "above 0"),
        (("-mg", "2"), "2 (-mg) is not one of the 2"),
        (("-mg", "-1", "-sm", "none"), "-1"),
        (("-sm", "rows"), "'rows' is unknown; there are: none, layer, tensor"),
        (("-ngl", "most"), "'most'"),
        (("-ngl", "-2"), "--n-gpu-layers=-2"),
        (("-ot", "ffn"), "'ffn'"),
        (("-ot", "(=CPU"), "'('"),
        (("-ot", "ffn=CPU,nothing=CPU"), "nothing=CPU"),
        (("-ot", "ffn=2"), "ffn=2"),
        (("-ot", "ffn=CUDA0"), "ffn=CUDA0"),
        (("--reduce-type", "f8"), "'f8' is unknown; there are: auto, f32, bf16, f16"),
        (("--reduce-provider", "nccl"), "nccl"),
        (("--submit-ahead", "some"), "some"),
        (("--runtime", "cuda"), "cuda"),
        (("-dev", "numpy,"), "''"),
        (("-m", "nowhere.gguf"), "nowhere.gguf"),
        (("--synthetic", "llama-8b:Q4_K"), "--synthetic"),
        (("--exchange-us", "30,many"), "30,many"),
        (("--exchange-us", "-3"), "-3"),
        (("--draft-accept", "1.5"), "1.5"),
        (("--gb-per-s", "0"), "--gb-per-s=0"),
        (("--gb-per-s", "3,2,1"), "3 speeds for 2 devices"),
    ],
)
def test_bad_values_are_named(
    args: tuple[str, ...], named: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(models / DENSE)
    assert cli.main(["plan", "-m", path, "-dev", "numpy,numpy", *args]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1 and named in err


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("VKBACKEND_DISABLE", "timeline,warp_drive", "warp_drive"),
        ("VKBACKEND_RUNTIME", "cuda", "cuda"),
        ("VKBACKEND_TIMEOUT", "soon", "soon"),
        ("VKBACKEND_FAULT", "Vulkan0:vkQueueSubmit:often:VK_ERROR_DEVICE_LOST", "often"),
        ("VKBACKEND_FAULT", "Vulkan0", "Vulkan0"),
    ],
)
def test_bad_variables_are_named_for_every_runtime(
    variable: str, value: str, named: str, models: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert cli.main(["plan", "-m", str(models / DENSE), "-dev", "numpy"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and variable.removeprefix("VKBACKEND_").lower() in err.lower()
    assert named in err


@pytest.mark.native
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--reduce-signal", "event"), "reduce_signal event needs .* not auto \\(pages\\)"),
        (("--submit-ahead", "one-call", "--reduce-provider", "ring"), "submit_ahead one-call .* not ring"),
    ],
)
def test_options_that_the_devices_cannot_follow(
    flags: tuple[str, ...], named: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan` refuses what `generate` refuses."""
    for command in ("plan", "generate"):
        words = [command, "-m", str(models / DENSE), "-dev", "0,0", *flags]
        words += ["-p", "x"] if command == "generate" else []
        assert cli.main(words) == 2
        out, err = capsys.readouterr()
        assert not out and re.search(named, err), err
    plan(capsys, "-m", str(models / DENSE), "-dev", "0,0", *flags[:2], "--reduce-provider", "visible")


def test_lists_of_overrides_and_words_for_layers(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["-m", str(models / DENSE), "-dev", "numpy,numpy", "-ts", "1,1"]
    both = plan(capsys, *command, "-ot", r"attn=CPU,blk\.\d{1,2}\.ffn_(up|gate)=host")
    apart = plan(capsys, *command, "-ot", r"blk\.\d{1,2}\.ffn_(up|gate)=host", "-ot", "attn=CPU")
    none = plan(capsys, *command)
    assert both["devices"] == apart["devices"] != none["devices"]
    assert plan(capsys, *command, "-ngl", "all")["devices"] == none["devices"]
    assert plan(capsys, *command, "-ngl", "auto")["devices"] == none["devices"], "all fit"
