"""Complete models run with 8-bit activations, and with the option `exact`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import compiled, fill
from device_sets import DEVICE_SETS, device_infos, in_turn, nmse, only, product, some
from material import shared_models
from oracles import make_formats
from prefills import opened, prefill

from vkbackend import LLM
from vkbackend.limits import INEXACT, Limits
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.ops import OPS, measured
from vkbackend.step import Run
from vkbackend.tools import cli
from vkbackend.tools.op_cases import quantized as op_cases_quantized
from vkbackend.twins.device import NumpyDevice

TABLE: measured.Table = {
    "one": ("mat_dot",),
    "few": ("mat_dot",),
    "some": ("mat_mul_dot",),
    "more": ("mat_mul_dot",),
    "many": ("mat_mul_dot",),
}
TYPES = sorted(kind.upper() for kind in op_cases_quantized.TYPES if kind not in make_formats.FORMATS)
FILES = [
    *(f"stories-w256-{kind}" for kind in TYPES), "stories-qwen2-Q8_0",
    *shared_models(*(f"stories260K-w256-{kind}" for kind in TYPES), "stories260K-qwen2-Q8_0"),
]  # fmt: skip
MIXTURES = [
    "stories-moe8x-MXFP4", "stories-moe8x-Q4_0",
    *shared_models("stories260K-moe8x-MXFP4", "stories260K-moe8x-Q4_0"),
]  # fmt: skip
SETS = {param.id: param for param in DEVICE_SETS}


@pytest.fixture
def dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every driver prefer 8-bit activations. Child processes read the same cache folder and make the
    same choice."""
    fill(tmp_path, compiled())
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    monkeypatch.delenv("VKBACKEND_EXACT")
    for info in device_infos():
        measured.save(info, TABLE)


def ops_of(runner: Runner, rows: int) -> set[str]:
    recordings = [
        executable.recording for executable in runner.mesh.recorded_step(StepKind.of_run(rows, 1)).executables
    ]
    return {getattr(c, "op", "copy") for recording in recordings for c in recording.commands}


def check_file(models: Path, name: str, devices: list[str]) -> np.ndarray:
    """Compare with llama.cpp's logits of a prompt. The last token is also computed alone in a step. The bound
    is an NMSE of 2e-3, because llama.cpp rounds activations too."""
    path = models / f"{name}.gguf"
    prompt = json.loads((models / "expected.json").read_text(encoding="utf-8"))[path.stem]["prompt_tokens"]
    want = np.load(models / "expected_logits.npz")[path.stem]
    with opened(path, devices) as runner:
        logits = prefill(runner, prompt)
        assert nmse(logits, want) <= 2e-3
        assert ops_of(runner, 16) >= {"mat_mul_dot", "quantize_q8"}
        again = runner.step(prompt[-1:], [Run(0, 0, 1, len(prompt) - 1)], [0])
        assert nmse(again, want[-1:]) <= 2e-3
        assert ops_of(runner, 1) >= {"mat_dot", "quantize_q8"}
        if "moe" in name:
            assert "mat_dot_id" in ops_of(runner, 1) and {"mat_dot_id", "mat_mul_dot_id"} & ops_of(runner, 16)
            assert not {"mat_vec_id", "mat_mul_id", "mat_lane_id"} & (ops_of(runner, 1) | ops_of(runner, 16))
    return logits


@pytest.fixture
def numpy_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(features=frozenset(OPS["mat_dot"].needs), choices=tuple(TABLE.items()))
    device_class = "vkbackend.models.engine.runner.open_devices.NumpyDevice"
    monkeypatch.setattr(device_class, lambda name: NumpyDevice(name, limits))
    monkeypatch.delenv("VKBACKEND_EXACT")


@pytest.mark.parametrize("name", some(FILES, 2))
def test_files_in_numpy(numpy_dots: None, models: Path, name: str) -> None:
    check_file(models, name, ["numpy"] * 2)


@pytest.mark.parametrize(("name", "n"), only(product(MIXTURES, [1, 3]), "stories-moe8x-MXFP4-3"))
def test_experts_in_numpy(numpy_dots: None, models: Path, name: str, n: int) -> None:
    check_file(models, name, ["numpy"] * n)


@pytest.mark.parametrize("name", ["stories-wide-Q4_0", "stories-w256-Q4_K"])
def test_slices_begin_on_blocks(numpy_dots: None, models: Path, name: str) -> None:
    """With another order of sums, an activation may round to the next code. Rounding to the next code changes
    an activation by 1/254 of its block's largest value."""
    single, three = (check_file(models, name, ["numpy"] * n) for n in (1, 3))
    assert nmse(three, single) <= 2e-4


@pytest.mark.native
@pytest.mark.parametrize(
    ("name", "devices"),
    only(
        product(["stories-w256-Q4_K", "stories-wide-Q8_0"], [SETS["0"], SETS["0,0,0"]]),
        "stories-w256-Q4_K-0,0,0",
    ),
)
def test_files(dots: None, models: Path, name: str, devices: list[str]) -> None:
    check_file(models, name, devices)


@pytest.mark.wide
@pytest.mark.native
@pytest.mark.parametrize(
    ("name", "devices"),
    in_turn([*FILES, *MIXTURES], [*DEVICE_SETS, pytest.param(["1"], id="1", marks=SETS["0,1"].marks)], 3),
)
def test_files_everywhere(dots: None, models: Path, name: str, devices: list[str]) -> None:
    check_file(models, name, devices)


# ---- exact ----


def logits_of(models: Path, devices: list[str], **options: Any) -> np.ndarray:
    with LLM(models / "stories-w256-Q4_K.gguf", devices=devices, n_ctx=64, n_ubatch=16, **options) as llm:
        return llm.logits([1, 403, 407, 261, 378])


@pytest.mark.native
@pytest.mark.parametrize("devices", DEVICE_SETS[:1])
@pytest.mark.parametrize("exact", only([True, False], "True"))
def test_the_engine_process_gives_the_same_bits(
    dots: None, models: Path, devices: list[str], exact: bool
) -> None:
    in_process = logits_of(models, devices, process=True, exact=exact)
    assert np.array_equal(in_process, logits_of(models, devices, exact=exact))


@pytest.mark.native
@pytest.mark.parametrize("devices", DEVICE_SETS[:1])
def test_exact_equals_a_device_without_eight_bit_ops(
    dots: None, models: Path, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def logits(**options: Any) -> np.ndarray:
        return logits_of(models, devices, **options)

    rounded, exact = logits(), logits(exact=True)
    assert 1e-9 < nmse(rounded, exact) <= 2e-3
    monkeypatch.setenv("VKBACKEND_DISABLE", "int_dot,cooperative_matrix,cooperative_matrix_nv")
    assert np.array_equal(logits(), exact)
    monkeypatch.delenv("VKBACKEND_DISABLE")
    monkeypatch.setenv("VKBACKEND_EXACT", "1")
    assert np.array_equal(logits(), exact)


@pytest.mark.parametrize("devices", DEVICE_SETS[:1])
def test_exact_devices_lack_eight_bit_ops(devices: list[str]) -> None:
    usual, exact = open_devices(devices)[0], open_devices(devices, exact=True)[0]
    try:
        assert exact.limits.features == usual.limits.features - INEXACT
    finally:
        usual.close()
        exact.close()


@pytest.mark.parametrize("command", ["generate", "bench", "sweep", "perplexity", "plan"])
def test_commands_accept_exact(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "--exact" in capsys.readouterr().out
