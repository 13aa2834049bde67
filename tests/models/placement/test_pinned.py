"""The system's memory and limits determine how many weights in host memory are pinned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.fixture import N_CTX, PROMPT, write
from oracles.fixtures import build
from runners import load_runner
from tiny_models import Tiny, write_tiny

from vkbackend.errors import OutOfDeviceMemory
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.placement import fit
from vkbackend.models.placement.host_limits import HostLimit
from vkbackend.step import Run
from vkbackend.tools.cli import main

LAYERS = {"n_gpu_layers": 2}
N = len(PROMPT)


def opened(path: Path, **options: Any) -> Runner:
    sizes = {"n_ctx": N_CTX, "n_ubatch": N_CTX, "tensor_split": (5, 3)}
    return load_runner(path, devices=["numpy"] * 2, **sizes | LAYERS | options)


def limit(patch: pytest.MonkeyPatch, nbytes: float) -> None:
    patch.setattr(fit, "least_host_limit", lambda: HostLimit("available", int(nbytes)))


def host_nbytes(runner: Runner) -> int:
    rows = runner.memory()
    return sum(row[home] for row in rows for home in ("host", "stream", "shared", "staging"))


def test_weights_that_do_not_fit_stay_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(build("qwen3moe"), tmp_path / "model.gguf")
    plain = opened(path)
    want, all_pinned = plain.step(PROMPT, [Run(0, 0, N, 0)], [N - 1]).copy(), host_nbytes(plain)
    assert not plain.layout.streamed and plain.options.pinned_mib == "auto"
    plain.close()
    limit(monkeypatch, all_pinned * 0.99)
    runner = opened(path)
    assert len(runner.layout.streamed) == 3 and host_nbytes(runner) < 0.9 * all_pinned
    assert any("stay in the file" in note for note in runner.notes)
    assert np.array_equal(runner.step(PROMPT, [Run(0, 0, N, 0)], [N - 1]), want)
    runner.close()
    words = ["plan", "-m", str(path), "-dev", "numpy,numpy", "-ts", "5,3", "-c", str(N_CTX), "-ngl", "2"]
    assert main([*words, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert sum(device["stream"] for device in planned["devices"]) > 0
    assert any("stay in the file" in note for note in planned["notes"])
    with pytest.raises(OutOfDeviceMemory, match="available"):
        opened(path, use_mmap=False)
    limit(monkeypatch, all_pinned * 0.2)
    with pytest.raises(OutOfDeviceMemory, match="available"):
        opened(path)


LIMITED = """
import json, resource, sys, threading
import numpy
from pathlib import Path
threading.stack_size(1 << 18)
from vkbackend.errors import VkbackendError
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.step import Run
def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
path, more, mmap = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "mmap"
numpy.ones((256, 256)) @ numpy.ones((256, 256))  # OpenBLAS allocates its buffers
if more:
    most = status("VmSize:") + path.stat().st_size + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    runner = Runner(Options.of(path, devices=["numpy"], n_gpu_layers=1, n_ctx=64, n_ubatch=16, use_mmap=mmap))
except VkbackendError as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
    sys.exit()
logits = runner.step(list(range(1, 17)), [Run(0, 0, 16, 0)], [15]).copy()
for i in range(3):
    logits = runner.step([5], [Run(0, 0, 1, 16 + i)], [0]).copy()
[row] = runner.memory()
print(json.dumps({"host": row["host"], "stream": row["stream"], "logits": logits.tolist(),
    "anonymous": status("RssAnon:"), "n_streamed": len(runner.layout.streamed)}))
"""


def run_limited(path: Path, more: int, how: str = "mmap") -> dict[str, Any]:
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, "-c", LIMITED, str(path), str(more), how]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=300
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.wide
def test_a_limit_of_the_system(tmp_path: Path) -> None:
    """A process whose address space may grow by 96 MiB (ulimit -v) runs a model of 192 MiB."""
    tiny = Tiny("qwen3", n_layer=64, n_ff=1024, n_embd=256)
    path = write_tiny(tmp_path / "model.gguf", tiny)
    free, limited = run_limited(path, 0), run_limited(path, 96 << 20)
    assert free["host"] > 180 << 20 and free["n_streamed"] == 0
    assert limited["host"] + limited["stream"] < 96 << 20 and limited["n_streamed"] >= 30
    assert limited["anonymous"] < free["anonymous"] - (90 << 20)
    assert limited["logits"] == free["logits"]
    refused = run_limited(path, 96 << 20, "copy")["error"]
    assert refused.startswith("OutOfDeviceMemory") and "ulimit -v" in refused
