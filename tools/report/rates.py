"""Parts that measure decode and prefill at several depths of the context, compile times, and llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from vkbackend import env
from vkbackend.errors import OutOfDeviceMemory, UnsupportedFeature
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.export import write_gguf
from vkbackend.models.options import Options
from vkbackend.tools.measure.compare import positions
from vkbackend.tools.measure.compile_times import compile_times
from vkbackend.tools.measure.cut_step import cut_times
from vkbackend.tools.measure.predicted import TokenTime
from vkbackend.tools.measure.synthetic import SHAPES, Synthetic
from vkbackend.tools.measure.timing import Timer, copy_rate, weight_nbytes_per_step
from vkbackend.tools.report.part import Group, LeftOut, Part, Row
from vkbackend.vulkan.instance import devices as listed

MODELS = ("llama-1b:Q4_K", "llama-8b:Q4_K", "qwen3-30b-a3b:Q4_K")
DEPTHS = (0, 4096, 32_768)
N_PROMPT, MOST_TOKENS, LEAST_TOKENS = 512, 64, 3
ROOM = N_PROMPT + MOST_TOKENS + 64  # Number of cache cells beyond the depth.
BOX_S = 2.0  # The timed tokens of a case should take this long.
MAX_LAYERS = 1 << 16
SOFTWARE_LAYERS, SOFTWARE_VOCAB = 1, 4096  # A software device takes seconds per token of a whole model.
SLOW_PROMPT_S = 20.0  # If a prompt takes longer than this, a shorter prompt is timed.


class Rates(Part):
    """Measures each device alone, then all together. The context is not computed, because a step's time does
    not depend on the cache's values."""

    title = "Tokens per second of synthetic models"
    share, deadline_s = 0.22, 180.0

    def __init__(self, devices: Group, rows: list[Row]) -> None:
        super().__init__(devices, rows)
        self._runner: Runner | None = None
        self._spec, self._depth, self._why = "", 0, ""

    @staticmethod
    def groups(devices: Sequence[str]) -> list[Group]:
        return [*((device,) for device in devices), *([tuple(devices)] if len(devices) > 1 else [])]

    def cases(self) -> list[str]:
        return [f"{spec} after {depth}" for spec in MODELS for depth in DEPTHS]

    def run(self, case: str) -> list[Row]:
        spec, _, words = case.partition(" after ")
        depth, runner = int(words), self._opened_for(spec)
        if depth > self._depth:
            raise LeftOut(self._why)
        timer = Timer(runner, runner.n_ctx)
        n_layer, published = runner.model.n_layer, SHAPES[spec.partition(":")[0].lower()][3]["block_count"]
        layers = "all" if n_layer == published else f"{n_layer} of {published}"
        row: Row = {"model": spec, "layers": layers, "depth": depth}
        timer.after(depth, 0, 1)
        once = timer.after(depth, 0, 1)
        n_gen = max(LEAST_TOKENS, min(MOST_TOKENS, int(BOX_S / once)))
        rate = n_gen / timer.after(depth, 0, n_gen)
        weights = weight_nbytes_per_step(runner) * rate
        row |= {"tg t/s": rate, "weight GB/s": weights / 1e9, "% of copy": 100 * weights / copy_rate(runner)}
        n_prompt, took_s = first_prompt(timer, depth)
        seconds = [took_s]
        while sum(seconds) < BOX_S and len(seconds) < 5:
            seconds.append(timer.after(depth, n_prompt, 0))
        row |= {"prompt": n_prompt, "pp t/s": n_prompt / statistics.median(seconds)}
        if not depth:
            row |= self._predicted(runner, 1 / rate)
            row |= self._cut(runner, timer)
        n, spent = runner.reduce_stats()
        return [row | ({"us/reduce": 1e6 * spent / n} if n else {})]

    def _predicted(self, runner: Runner, measured_s: float) -> Row:
        """Predict a token's time from measured speeds and from the times of tokens in earlier cases."""
        token = TokenTime(runner, measures=True)
        if token.rate is None or token.times is None:
            return {}
        token.learn(measured_s)
        row: Row = {"predicted t/s": token.rate}
        if token.n_exchanges:
            row |= {"exchanges": token.n_exchanges, "exchange ms": token.times.reduce_ms}
        return row

    def _cut(self, runner: Runner, timer: Timer) -> Row:
        """Time one device with as many segments as two devices would have."""
        if len(self.devices) > 1:
            return {}
        whole, cut = cut_times(runner, timer)
        return {"% of t/s in segments": 100 * whole / cut}

    def _opened_for(self, spec: str) -> Runner:
        """Open the model with the deepest context that fits. Halve the number of layers until a context
        fits."""
        if self._runner is None or self._spec != spec:
            self.close()
            self._runner, self._depth, self._why = open_model(spec, self.devices)
            self._spec = spec
        return self._runner

    def close(self) -> None:
        super().close()
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def open_model(spec: str, devices: Group) -> tuple[Runner, int, str]:
    """Return the runner, the deepest context that fits, and why no deeper one fits. Raises LeftOut if one
    layer does not fit."""
    why, most, n_vocab = "", MAX_LAYERS, 0
    if has_software(devices):
        most, n_vocab = SOFTWARE_LAYERS, SOFTWARE_VOCAB
    for n_layer in (n for n in halved(spec) if n <= most):
        for depth in reversed(DEPTHS):
            options = Options.of(spec, devices=devices, n_ctx=depth + ROOM, n_ubatch=N_PROMPT)
            try:
                return Runner(options, Synthetic(spec, n_layer, n_vocab)), depth, why
            except OutOfDeviceMemory as error:
                why = str(error)
    raise LeftOut(why)


def has_software(devices: Group) -> bool:
    return any(info.is_cpu for info in listed() if str(info.index) in devices)


def halved(spec: str) -> Iterator[int]:
    n = SHAPES[spec.partition(":")[0].lower()][3]["block_count"]
    while n:
        yield n
        n //= 2


def first_prompt(timer: Timer, depth: int) -> tuple[int, float]:
    """Return the length of the prompt to time, and its seconds after a warm-up. The length is 512, or shorter
    if a prompt that is four times as long would take more than 20 s."""
    n = 16
    while True:
        timer.after(depth, n, 0)
        took_s = timer.after(depth, n, 0)
        if n == N_PROMPT or took_s * 4 > SLOW_PROMPT_S:
            return n, took_s
        n = min(4 * n, N_PROMPT)


class Compiling(Part):
    """Measures a start with the drivers' caches disabled."""

    title = "Seconds to compile the pipelines of a token and a prompt"
    share, deadline_s = 0.04, 240.0
    environment: ClassVar[dict[str, str]] = {
        "MESA_SHADER_CACHE_DISABLE": "true",
        "__GL_SHADER_DISK_CACHE": "0",
    }

    def cases(self) -> list[str]:
        return [MODELS[1], MODELS[2]]

    def run(self, case: str) -> list[Row]:
        options = Options.of(case, devices=self.devices, n_ctx=1024, n_ubatch=N_PROMPT)
        runner = Runner(options, Synthetic(case, 1, 4096))
        try:
            n, took = compile_times(runner, N_PROMPT, sorted({1, env.compile_threads()}), 1)
            times = {f"{way} threads" if way.isdecimal() else way: min(s) for way, s in took.items()}
            return [{"model": case, "pipelines": n, **{f"{way}, s": s for way, s in times.items()}}]
        finally:
            runner.close()


class LlamaCpp(Part):
    title = "llama.cpp on the same models (`llama-bench`)"
    share, deadline_s = 0.08, 300.0

    @staticmethod
    def groups(devices: Sequence[str]) -> list[Group]:
        return Rates.groups(devices)

    def cases(self) -> list[str]:
        if shutil.which("llama-bench") is None:
            raise UnsupportedFeature("llama-bench is not installed (build llama.cpp with -DGGML_VULKAN=ON)")
        return list(MODELS)

    def run(self, case: str) -> list[Row]:
        runner, depth, _ = open_model(case, self.devices)
        try:
            visible, n_layer = positions(runner), runner.model.n_layer
        finally:
            runner.close()
        source = Synthetic(case, n_layer)
        nbytes = sum(info.nbytes for info in source.tensors.values())
        with tempfile.TemporaryDirectory(prefix="vkbackend-report-") as folder:
            if (free := shutil.disk_usage(folder).free) < 1.1 * nbytes:
                raise LeftOut(f"its file of {nbytes >> 20} MiB needs more than the {free >> 20} MiB on disk")
            path = Path(folder) / "model.gguf"
            write_gguf(path, source, (), {}, ())
            depths = ",".join(str(d) for d in DEPTHS if d <= depth)
            words = ["-m", str(path), "-p", str(N_PROMPT), "-n", "32", "-d", depths, "-r", "2", "-o", "json"]
            command = ["llama-bench", *words, "-ngl", "99"]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, "GGML_VK_VISIBLE_DEVICES": visible},
            )
        if done.returncode:
            said = done.stderr.strip()[-300:]
            raise UnsupportedFeature(f"llama-bench ended with {done.returncode}: {said}")
        return [rate_of(case, n_layer, result) for result in json.loads(done.stdout)]


def rate_of(case: str, n_layer: int, result: dict[str, Any]) -> Row:
    test = f"pp{result['n_prompt']}" if result.get("n_prompt") else f"tg{result.get('n_gen')}"
    build = f"{result.get('build_commit', '?')} ({result.get('build_number', '?')})"
    row = {"model": case, "layers": n_layer, "depth": result.get("n_depth", 0), "test": test}
    return row | {"t/s": result.get("avg_ts"), "llama.cpp": build}
