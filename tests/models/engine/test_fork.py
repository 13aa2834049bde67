"""A forked child cannot use its parent's model, and the parent continues to work."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import device_infos, wide
from runners import load_runner
from tiny_models import Tiny, write_tiny

from vkbackend import LLM
from vkbackend.buffer import Home, View
from vkbackend.errors import ForkedProcess
from vkbackend.pages import HostPages
from vkbackend.recording import Recording
from vkbackend.step import Run

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
CHILD_S = 30  # a child that runs longer than this hangs
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SETS = [["numpy", "numpy"], *([["0"]] if device_infos() else [])]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", Tiny("qwen3", n_layer=2))


def in_child(check: Callable[[], object]) -> int:
    """Fork, run `check` in the child, and return the child's exit code. The code is 0 if `check` passed, and
    negative after a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CHILD_S)
            check()
            gc.collect()
            code = 0
        except BaseException as error:
            sys.__stderr__.write(f"{error!r}\n")  # type: ignore[union-attr]
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("devices", "process"),
    [
        wide(pytest.param(SETS[0], False)),
        *((devices, False) for devices in SETS[1:]),
        wide(pytest.param(["numpy"], True)),
    ],
    ids=str,
)
def test_llm(tiny: Path, devices: list[str], process: bool) -> None:
    llm = LLM(tiny, devices=devices, n_ctx=64, n_slots=2, process=process)
    want = llm.generate([1, 2], 8, **GREEDY).tokens
    stream = llm.stream([1, 3], 60, **GREEDY)
    first = next(stream)

    def refuses() -> None:
        for call in (
            lambda: llm.generate([1], 1), lambda: llm.stream([1], 1), lambda: next(stream), llm.memory,
            lambda: llm.logits([1]), lambda: llm.tokenize("a"), lambda: llm.detokenize([1]),
            lambda: llm.save_state("nowhere"), lambda: llm.load_state("nowhere"), lambda: llm.copy_slot(0, 1),
        ):  # fmt: skip
            with pytest.raises(ForkedProcess, match=r"after the fork.*spawn"):
                call()

    def closes() -> None:
        stream.close()
        llm.close()
        llm.close()

    def drops() -> None:
        nonlocal llm, stream
        del llm, stream

    for check in (refuses, closes, drops):
        assert in_child(check) == 0, check
    assert llm.generate([1, 2], 8, **GREEDY).tokens == want
    assert [first.token, *(chunk.token for chunk in stream)][:8] == llm.generate([1, 3], 8, **GREEDY).tokens
    llm.close()


@pytest.mark.parametrize("devices", [wide(pytest.param(SETS[0])), *SETS[1:]], ids=",".join)
def test_while_a_step_runs(tiny: Path, devices: list[str]) -> None:
    with LLM(tiny, devices=devices, n_ctx=64) as llm:
        results: list[list[int]] = []
        thread = threading.Thread(target=lambda: results.append(llm.generate([1, 2], 50, **GREEDY).tokens))
        thread.start()

        def refuses() -> None:
            with pytest.raises(ForkedProcess):
                llm.generate([1], 1)
            llm.close()

        codes = []
        while thread.is_alive() and len(codes) < 4:
            codes.append(in_child(refuses))
            time.sleep(0.01)
        thread.join(60)
        assert codes and not any(codes)
        assert results == [llm.generate([1, 2], 50, **GREEDY).tokens]


@pytest.mark.parametrize("devices", SETS, ids=",".join)
def test_runner_and_device(tiny: Path, devices: list[str]) -> None:
    runner = load_runner(tiny, devices=devices, n_ctx=64)
    device, page = runner.mesh.devices[0], np.zeros(64, np.float32)
    want = runner.step([5], [Run(0, 0, 1, 0)], [0]).copy()
    buffer = device.buffer(256, Home.STAGING, "words")
    view = View(buffer, 0, (64,))
    recording = Recording("copy")
    recording.copy(view.reshape(2, 32).rows(0, 1), view.reshape(2, 32).rows(1, 2), "copy")

    def refuses() -> None:
        for call in (
            lambda: runner.step([5], [Run(0, 0, 1, 0)], [0]),
            lambda: device.buffer(256, Home.KV, "more"), lambda: device.write(view, page),
            lambda: device.read(view), lambda: device.run(recording), lambda: device.build(recording),
            runner.memory, device.queue.completed, lambda: device.import_pages(HostPages(1), "pages"),
        ):  # fmt: skip
            with pytest.raises(ForkedProcess, match="after the fork"):
                call()

    def closes() -> None:
        device.free(buffer)
        runner.close()
        device.close()

    for check in (refuses, closes):
        assert in_child(check) == 0, check
    assert np.array_equal(runner.step([5], [Run(0, 0, 1, 0)], [0]), want)
    device.free(buffer)
    runner.close()
    assert all(not d.counts for d in [device])


def test_pages() -> None:
    pages = HostPages(1 << 16)
    pages.bytes[:] = 7

    def zeros() -> None:
        nonlocal pages
        assert not pages.bytes.any()
        del pages
        gc.collect()

    assert in_child(zeros) == 0
    assert (pages.bytes == 7).all()


def test_a_model_of_the_child(tiny: Path) -> None:
    """Vulkan drivers do not survive a fork, so a child can use Vulkan only if its parent has not used it."""
    with LLM(tiny, devices=["numpy"], n_ctx=64) as llm:
        want = llm.generate([1, 2], 8, **GREEDY).tokens

        def works() -> None:
            with LLM(tiny, devices=["numpy"], n_ctx=64) as child:
                assert child.generate([1, 2], 8, **GREEDY).tokens == want

        assert in_child(works) == 0

    def refuses() -> None:
        with pytest.raises(ForkedProcess, match="Vulkan was in use"):
            LLM(tiny, devices=["0"], n_ctx=64)

    if device_infos():  # opening this model creates the Vulkan instance
        assert in_child(refuses) == 0


EXITS = """
import os, sys
from vkbackend import LLM

if __name__ == "__main__":
    options = {"temperature": 0, "ignore_eos": True}
    llms = [LLM(sys.argv[1], devices=["numpy"], n_ctx=64, process=True)]
    if sys.argv[2] == "True":  # Vulkan is present
        llms.append(LLM(sys.argv[1], devices=["0"], n_ctx=64))
    want = [llm.generate([1, 2], 8, **options).tokens for llm in llms]
    pid = os.fork()
    if pid == 0:
        sys.exit(5)  # with all that runs at the end of a program
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    assert [llm.generate([1, 2], 8, **options).tokens for llm in llms] == want
    streams = [llm.stream([1, 2], 60) for llm in llms]
    for stream in streams:
        next(stream)
    # Nothing is closed.
"""


def test_parent_and_child_exit(tiny: Path, tmp_path: Path) -> None:
    """The parent has an engine in a process and an engine on a Vulkan device."""
    script = tmp_path / "exits.py"
    script.write_text(EXITS, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", str(script), str(tiny), str(bool(device_infos()))]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


ABORTS = """
import ctypes, os, sys
from vkbackend.vulkan.instance import devices

libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)  # as a driver that fails at the end
devices()
pid = os.fork()
if pid == 0:
    print("child", end="")
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
os._exit(0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc's on_exit")
def test_a_child_ends_before_the_exit_handlers_of_drivers() -> None:
    if not device_infos():
        pytest.skip("no Vulkan device is present")
    command = [sys.executable, "-W", "ignore", "-c", ABORTS]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "child", "")
