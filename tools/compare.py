"""llama.cpp beside us: the same file, devices and tests in turn, so that a busy machine slows both."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any, Self

from vkbackend.errors import InvalidArgument, Timeout, UnsupportedFeature
from vkbackend.models.arguments import device_list, layer_count
from vkbackend.models.gguf import GGUF
from vkbackend.tools.synthetic import Synthetic
from vkbackend.tools.timing import Test, Timer, Timing

WAIT_S = 600.0  # for one answer: loading a model, or one run of a test


class LlamaCpp:
    """llama-cpp-python in a process of its own, with `file` loaded on the devices that the flags name.

    Raises UnsupportedFeature where the package is missing or does not load the file, InvalidArgument for a
    model without a file.
    """

    def __init__(self, gguf: GGUF, args: argparse.Namespace, n_ctx: int) -> None:
        if isinstance(gguf, Synthetic):
            raise InvalidArgument("--compare needs a file that both can read; a synthetic model has none")
        if importlib.util.find_spec("llama_cpp") is None:
            raise UnsupportedFeature(
                "--compare llama-cpp needs the llama-cpp-python package: pip install llama-cpp-python (with "
                "CMAKE_ARGS=-DGGML_VULKAN=ON for its Vulkan backend)"
            )
        wanted = layer_count("--n-gpu-layers", args.n_gpu_layers)
        layers = wanted if isinstance(wanted, int) else -1
        command = [sys.executable, "-m", "vkbackend.tools.llama_cpp_worker", str(gguf.paths[0]), str(n_ctx)]
        names = [name for name in device_list(args.device) or ("0",) if name.isdecimal()]
        environment = {**os.environ, "GGML_VK_VISIBLE_DEVICES": ",".join(dict.fromkeys(names))}
        self._process = subprocess.Popen(
            [*command, str(args.ubatch_size), str(layers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        try:
            self.build = self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def beside(self, timer: Timer, test: Test, repetitions: int) -> tuple[Timing, Timing]:
        """(ours, theirs), run in turn A B A B after one warm-up of theirs."""
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
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the missing answer tells
            self._process.stdin.write(json.dumps(ask) + "\n")
            self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        """The next line; a process that does not answer in time is ended."""
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
            raise UnsupportedFeature(
                "llama.cpp ended without an answer; run it by hand to see why: "
                f"{' '.join(map(str, self._process.args))}"  # type: ignore[arg-type]
            )
        return dict(json.loads(line))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
