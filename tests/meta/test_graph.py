"""A model runs on numpy devices. The tests cover exchanges, hazards, and any number of devices."""

from __future__ import annotations

import re
import threading
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import covering, nmse, only, product, some, wide
from places import ROOT
from prefills import opened, prefill
from recordings import without_each_barrier
from tiny_models import Tiny, write_tiny

from tests.support.placement import check_placement
from vkbackend.buffer import Home
from vkbackend.errors import UnsupportedFeature
from vkbackend.hazards import check
from vkbackend.limits import Limits
from vkbackend.memory import plan_scratch
from vkbackend.meta.split import Kind
from vkbackend.meta.step_kind import StepKind
from vkbackend.meta.tensor import Weight
from vkbackend.models.architectures.registry import ARCHITECTURES
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.ops import OPS
from vkbackend.recording import Copy, Exchange, Recording
from vkbackend.step import Run
from vkbackend.twins.device import NullDevice, NumpyDevice

pytestmark = pytest.mark.no_vulkan


TOKENS = [1, *np.random.default_rng(5).integers(3, 500, 19).tolist()]


def on_numpy(
    models: Path, n: int, name: str = "stories-narrow-F32", **options: Any
) -> AbstractContextManager[Runner]:
    return opened(models / f"{name}.gguf", ["numpy"] * n, **{"n_ubatch": 512} | options)


_single: dict[str, np.ndarray] = {}


def on_one(models: Path, name: str = "stories-narrow-F32") -> np.ndarray:
    if name not in _single:
        with on_numpy(models, 1, name) as runner:
            _single[name] = prefill(runner, TOKENS)
    return _single[name]


# ---- what is exchanged ----


@pytest.mark.parametrize(("n", "rows"), covering([1, 2, 3, 5], [1, 4, 16]))
def test_two_exchanges_per_layer_and_none_on_one_device(models: Path, n: int, rows: int) -> None:
    with on_numpy(models, n) as runner:
        step = runner.mesh.recorded_step(StepKind.of_run(rows, 1))
        want = 2 * runner.model.n_layer if n > 1 else 0
        assert len(step.reduces) == want
        for executable in step.executables:
            assert sum(isinstance(c, Exchange) for c in executable.recording.commands) == want
            assert executable.n_segments == want + 1
        assert all(r.elements == rows * runner.model.n_embd for r in step.reduces)
        assert [r.parity for r in step.reduces] == [0, 1] * (want // 2)


@pytest.mark.parametrize("n", [2, 5])
def test_bytes_per_exchange(models: Path, n: int) -> None:
    """Each device that has a share of the layer sends rows * n_embd floats. Other devices send nothing."""
    rows = 4
    with on_numpy(models, n) as runner:
        step = runner.mesh.recorded_step(StepKind.of_run(rows, 1))
        sent = np.zeros((len(step.reduces), n), np.int64)
        for d, executable in enumerate(step.executables):
            for s, segment in enumerate(executable.recording.segments()):
                for command in segment:
                    if isinstance(command, Copy) and command.dst.buffer.home is Home.PAGES:  # type: ignore[union-attr]
                        sent[s, d] += command.dst.nbytes
        for s, reduce in enumerate(step.reduces):
            want = [4 * rows * runner.model.n_embd * (d in reduce.writers) for d in range(n)]
            assert sent[s].tolist() == want
        writers = {len(r.writers) for r in step.reduces}
        # With four kv heads on five devices, one device has FFN columns but no attention.
        assert writers == ({4, 5} if n == 5 else {2})


# ---- order ----


@pytest.mark.parametrize(("n", "rows"), only(product([2, 1, 5], [16, 1]), "2-16", "2-1"))
def test_steps_have_no_hazards_and_every_barrier_is_missed(models: Path, n: int, rows: int) -> None:
    with on_numpy(models, n) as runner:
        for executable in runner.mesh.recorded_step(StepKind.of_run(rows, rows)).executables:
            assert not check(executable.recording)
            dropped = list(without_each_barrier(executable.recording))
            assert len(dropped) > 4 * runner.model.n_layer
            for i, (barrier, crippled) in enumerate(dropped):
                assert check(crippled), f"nobody misses barrier {i}, {barrier.scope}"


@pytest.mark.parametrize("rows", [1, 16])
def test_scratch_is_reused_without_a_clash(models: Path, rows: int) -> None:
    with on_numpy(models, 3) as runner:
        mesh = runner.mesh
        builder = replace(mesh.steps.builder, reduce_type="f32")
        for recording in builder.recorded(StepKind.of_run(rows, 1)).recordings:
            offsets, total = plan_scratch(recording)
            assert offsets and not check_placement(recording, offsets)
            assert total < plan_scratch(recording, reuse=False)[1] / 3


# ---- numbers ----


@pytest.mark.parametrize(
    ("n", "ratio"),
    [
        wide(pytest.param(2, None)),
        wide(pytest.param(3, None)),
        wide(pytest.param(5, None)),
        (3, [5, 3, 2]),
        wide(pytest.param(2, [1, 0])),
        wide(pytest.param(2, [0, 1])),
        (3, [1, 0, 2]),
        (5, [9, 1, 1, 1, 1]),
    ],
)
def test_any_devices_and_shares_equal_one(models: Path, n: int, ratio: list[float] | None) -> None:
    with on_numpy(models, n, tensor_split=ratio) as runner:
        assert nmse(prefill(runner, TOKENS), on_one(models)) <= 1e-9
        again = runner.step(TOKENS[-1:], [Run(0, 0, 1, len(TOKENS) - 1)], [0])
        assert nmse(again, on_one(models)[-1:]) <= 1e-9


@pytest.mark.parametrize(
    ("name", "n"), covering(["stories-narrow-F16", "stories-narrow-Q8_0", "stories-narrow-Q4_0"], [2, 3])
)
def test_formats_on_several_devices_equal_one(models: Path, name: str, n: int) -> None:
    with on_numpy(models, n, name) as runner:
        assert nmse(prefill(runner, TOKENS), on_one(models, name)) <= 1e-9


@pytest.mark.parametrize(("ahead", "provider"), some(covering([0, 1, 3, None], ["pages", "host-sum"]), 3))
def test_depth_and_provider_change_no_bit(models: Path, provider: str, ahead: int | None) -> None:
    with on_numpy(models, 2) as runner:
        want = prefill(runner, TOKENS)
    with on_numpy(models, 2, reduce_provider=provider, submit_ahead=ahead) as runner:
        assert np.array_equal(prefill(runner, TOKENS), want)


@pytest.mark.parametrize("n", [1, 3])
def test_unwritten_memory_does_not_affect_results(models: Path, n: int) -> None:
    """The memory of a numpy device is initially NaN. Between steps, the test sets scratch and unused cells to
    NaN."""
    with on_numpy(models, n, n_slots=2) as runner:
        want = prefill(runner, TOKENS)
        assert np.isfinite(want).all()
        for step in range(3):
            for arena in runner.mesh.steps.arenas:
                arena.host[:] = 0xFF
            tokens = TOKENS[: 5 + step]  # the runner pads these steps to 8 rows
            got = runner.step(tokens, [Run(1, 0, len(tokens), 0)], [len(tokens) - 1])
            assert nmse(got, want[len(tokens) - 1 : len(tokens)]) <= 1e-9


def test_null_devices_replay_a_whole_model(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkbackend.models.engine.runner.open_devices.NumpyDevice", NullDevice)
    with on_numpy(models, 2) as runner:
        runner.step([1], [Run(0, 0, 1, 0)], [0])
        layers = runner.model.n_layer
        for device in runner.mesh.devices:
            assert isinstance(device, NullDevice)
            assert device.executed["add_partials"] == 2 * layers
            assert device.executed["attn_decode"] == layers and not device.executed["attn_combine"]
            assert device.executed["mat_vec"] == 6 * layers + 1  # one dispatch computes gate and up
            assert device.executed["kv_store"] == 2 * layers


def test_prompts_attend_on_matrix_units(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VKBACKEND_EXACT", raising=False)
    features = frozenset(OPS["attn_prefill_coop"].needs)
    limits = Limits(max_invocations=1024, max_shared_nbytes=1 << 15, features=features)
    device_class = "vkbackend.models.engine.runner.open_devices.NumpyDevice"
    monkeypatch.setattr(device_class, lambda name: NullDevice(name, limits))
    with on_numpy(models, 1, "stories-w256-Q4_K") as runner:
        runner.step(TOKENS, [Run(1, 0, len(TOKENS), 0)], [4])
        (device,) = runner.mesh.devices
        assert isinstance(device, NullDevice)
        assert device.executed["attn_prefill_coop"] == runner.model.n_layer
        assert not device.executed["attn_prefill"] and not device.executed["attn_decode"]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_groups_of_heads_decode_on_matrix_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Attention on matrix units equals the other attention ops. Eight q heads share a kv head. Devices share
    the q heads of one kv head, and dispatches share the keys."""
    monkeypatch.delenv("VKBACKEND_EXACT", raising=False)
    write_tiny(tmp_path / "tiny.gguf", Tiny("qwen3", n_head=16, head_dim=32, n_layer=1))
    features, ran = frozenset(OPS["attn_decode_coop"].needs), Counter[str]()

    class Counting(NumpyDevice):
        def execute(self, command: Any) -> None:
            ran[getattr(command, "op", "")] += 1
            super().execute(command)

    logits = []
    for limits in (Limits(), Limits(1024, 1 << 15, features=features)):
        ran.clear()
        device_class = "vkbackend.models.engine.runner.open_devices.NumpyDevice"
        monkeypatch.setattr(device_class, lambda name, limits=limits: Counting(name, limits))
        with on_numpy(tmp_path, n, "tiny", n_ctx=256, type_k="f16", type_v="q8_0") as runner:
            prefill(runner, TOKENS)
            logits.append(runner.step([7], [Run(0, 0, 1, len(TOKENS))], [0]).copy())
            assert ran["attn_combine"] == n
            coop = n if limits.features else 0
            assert (ran["attn_decode_coop"], ran["attn_decode"]) == (coop, n - coop)
    assert nmse(*logits) < 1e-9


def test_devices_compile_in_parallel(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compilation waits until the other starts, so sequential compilations would never end."""
    meeting, compiled = threading.Barrier(2), []

    def compile_(device: NumpyDevice, recording: Recording) -> None:
        meeting.wait(20)
        compiled.append((device.name, recording.name))

    monkeypatch.setattr(NumpyDevice, "compile", compile_)
    with on_numpy(models, 2) as runner:
        runner.mesh.recorded_step(StepKind.of_run(1, 1))
    assert sorted(name for name, _ in compiled) == ["numpy.0", "numpy.1"]


def test_a_compile_error_of_one_device_is_raised(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(device: NumpyDevice, recording: Recording) -> None:
        if device.name == "numpy.1":
            raise UnsupportedFeature("numpy.1 has no compiler")

    monkeypatch.setattr(NumpyDevice, "compile", compile_)
    with on_numpy(models, 2) as runner, pytest.raises(UnsupportedFeature, match=r"numpy\.1 has no compiler"):
        runner.mesh.recorded_step(StepKind.of_run(1, 1))


# ---- model files ----


def test_model_files_contain_no_reduce_and_no_device_count() -> None:
    pattern = r"(?i:reduce)|\bn_devices\b|\bdevices?\b|\bworld\b|\.n\b|\bmesh\b|len\(.*devices"
    names = [f"{name.replace('-', '_')}.py" for name in (*ARCHITECTURES, "decoder")]
    texts = {name: (ROOT / "models" / "architectures" / name).read_text(encoding="utf-8") for name in names}
    assert not {name: match for name, text in texts.items() if (match := re.findall(pattern, text))}


def test_weights_are_on_the_devices_of_the_plan(models: Path) -> None:
    with on_numpy(models, 3) as runner:
        for name, weight in runner.mesh.weights.items():
            assert isinstance(weight, Weight)
            held = sum(int(np.prod(v.shape)) for pieces in weight.pieces for _, v in pieces)
            n_copies = 1 if weight.state.kind is Kind.SPLIT else 3
            assert held == n_copies * int(np.prod(weight.shape)), name
