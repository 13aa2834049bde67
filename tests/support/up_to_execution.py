"""A program for a driver that does not execute submissions. The program opens models, records their steps,
submits one step, and prints each model's error as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from oracles.fixture import N_CTX, PROMPT, write
from oracles.fixtures import build

from vkbackend.errors import VkbackendError
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.step import Run


def ended(path: Path, devices: list[str]) -> str:
    try:
        runner = Runner(Options.of(path, devices=devices, tensor_split=[1.0] * len(devices), n_ctx=N_CTX))
    except VkbackendError as error:
        return f"{type(error).__name__} while it was opened: {error}"
    try:
        runner.step(PROMPT, [Run(0, 0, len(PROMPT), 0)], [len(PROMPT) - 1])
    except VkbackendError as error:
        return type(error).__name__
    finally:
        runner.close()
    return ""


def main() -> None:
    devices, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = write(build(name), Path(folder) / "model.gguf")
            print(json.dumps({"model": name, "ended": ended(path, devices.split(","))}), flush=True)


if __name__ == "__main__":
    main()
