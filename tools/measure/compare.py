"""Runs llama.cpp on the same file, devices and tests. The two programs take turns, so other load slows
both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from vkbackend.errors import InvalidArgument, Timeout, UnsupportedFeature
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.export import write_gguf
from vkbackend.models.gguf.header import TENSOR_TYPES
from vkbackend.models.gguf.reader import GGUF
from vkbackend.tools.measure.synthetic import Synthetic
from vkbackend.tools.measure.timing import Test, Timer, Timing

WORKER = "vkbackend.tools.measure.llama_cpp_worker"
WAIT_S = 1800.0  # Time limit for an answer, a load or a test. Software devices compile for minutes.


def check_comparable(args: argparse.Namespace) -> None:
    """Raise an error early if llama.cpp is missing, or if these flags make it do different work."""
    for flag, given in (
        ("control vectors", args.control_vectors),
        ("--override-tensor", args.override_tensor or args.host_tensors),
    ):
        if given:
            raise InvalidArgument(
                f"--compare llama-cpp does not pass {flag} on to llama.cpp, so the two would do different "
                "work; leave one of them out"
            )
    if importlib.util.find_spec("llama_cpp") is None:
        raise UnsupportedFeature(
            "--compare llama-cpp needs the llama-cpp-python package: pip install llama-cpp-python (with "
            "CMAKE_ARGS=-DGGML_VULKAN=ON for its Vulkan backend)"
        )


class LlamaCpp:
    """llama-cpp-python in a separate process, with the runner's model and devices.

    Synthetic models are written to a temporary file. `build` is llama.cpp's version. If `n_texts` is not 0,
    the process computes embeddings of up to n_texts texts at once, each of at most n_ctx / n_texts tokens.
    Raises UnsupportedFeature if the package has no Vulkan backend or cannot load the file.
    """

    def __init__(self, gguf: GGUF, runner: Runner, n_ctx: int, n_texts: int = 0) -> None:
        visible = positions(runner)
        self._folder = tempfile.TemporaryDirectory(prefix="vkbackend-compare-")
        try:
            path = gguf.paths[0]
            if isinstance(gguf, Synthetic):
                path = Path(self._folder.name) / f"{path.name}.gguf"
                write_gguf(path, gguf, (), {}, ())
            self._log = open(Path(self._folder.name) / "log", "w+", encoding="utf-8", errors="replace")
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER, json.dumps(wanted(path, runner, n_ctx, n_texts))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                env={**os.environ, "GGML_VK_VISIBLE_DEVICES": visible},
            )
        except BaseException:
            self._folder.cleanup()
            raise
        try:
            self.build = self._answer()
            if not self.build["gpu"]:
                raise UnsupportedFeature(
                    "--compare llama-cpp: the llama-cpp-python that is installed has no Vulkan backend; "
                    "build it with CMAKE_ARGS=-DGGML_VULKAN=ON"
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def alternate(self, timer: Timer, test: Test, repetitions: int) -> tuple[Timing, Timing]:
        """Return vkbackend's times and llama.cpp's times. Runs alternate after a warm-up of both programs."""
        self._run(timer, test)
        before = timer.runner.reduce_stats()
        ours, theirs = [], []
        for _ in range(repetitions):
            ours.append(timer.once(test))
            theirs.append(self._run(timer, test))
        return timer.timing(test, ours, *before), Timing(test, tuple(theirs), None)

    def _run(self, timer: Timer, test: Test) -> float:
        ask = {
            "tokens": timer.tokens[: test.n_depth + test.n_tokens],
            "n_depth": test.n_depth,
            "n_prompt": test.n_prompt,
            "n_gen": test.n_gen,
        }
        return float(self._ask(ask)["seconds"])

    def embed(self, texts: Sequence[Sequence[int]]) -> tuple[float, float, np.ndarray]:
        """Return seconds, seconds of CPU time, and the mean of each text's hidden states, float32 [n,
        n_embd]."""
        answer = self._ask({"texts": texts})
        return answer["seconds"], answer["cpu_s"], np.array(answer["embeddings"], np.float32)

    def _ask(self, ask: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_answer` reports a process that has ended
            self._process.stdin.write(json.dumps(ask) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watchdog = threading.Timer(WAIT_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            in_time = watchdog.is_alive()
            watchdog.cancel()
        if not in_time:
            raise Timeout(f"llama.cpp did not answer within {WAIT_S:.0f} s")
        if not line:
            self._process.wait()
            self._log.seek(0)
            said = [line.strip() for line in self._log if line.strip()][-3:]
            raise UnsupportedFeature(f"llama.cpp ended without an answer; it said: {' | '.join(said)}")
        return dict(json.loads(line))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()
        self._folder.cleanup()


def positions(runner: Runner) -> str:
    """Return the devices' indices in the Vulkan loader's order, which llama.cpp uses."""
    physical = [device.physical for device in runner.mesh.devices if device.physical]
    if len(physical) < len(runner.mesh.devices):
        raise UnsupportedFeature("--compare llama-cpp needs Vulkan devices; numpy is not one")
    from vkbackend.vulkan.instance import position  # needs the Vulkan loader

    return ",".join(str(position(info)) for info in physical)


def wanted(path: Path, runner: Runner, n_ctx: int, n_texts: int) -> dict[str, Any]:
    options, ids = runner.options, {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
    mode = options.split_mode
    return {
        "path": str(path),
        "n_ctx": n_ctx,
        "n_ubatch": runner.n_ubatch,
        "n_texts": n_texts,
        "n_gpu_layers": options.n_gpu_layers,
        "split_mode": {"hosts": "tensor"}.get(mode, mode) if len(runner.mesh.devices) > 1 else "none",
        "tensor_split": list(options.shares or ()),
        "kv_offload": options.kv_offload,
        "type_k": ids[options.type_k],
        "type_v": ids[options.type_v],
    }
