"""Ctrl-C interrupts calls of LLM, before every bytecode and at random moments."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
from device_sets import device_infos
from fake_runner import FakeRunner, continuation
from gguf_files import U32, gguf_bytes, key
from struck import interrupt_everywhere
from tiny_models import Tiny, write_tiny

from vkbackend import LLM
from vkbackend.errors import VkbackendError
from vkbackend.meta.load import Progress
from vkbackend.models import llm as llm_module
from vkbackend.models.engine import answers, channel
from vkbackend.models.options import Options
from vkbackend.tools.studies import interrupt_rounds, interrupts

CALLERS = {module.__file__ for module in (llm_module, answers, channel)}
PROMPT = [1, 8]
RELEASED_S = 20.0


class Runner(FakeRunner):
    opened: list[Runner] = []  # noqa: RUF012

    def __init__(self, options: Options, progress: Progress, **how_loaded: object) -> None:
        progress(1, 2)
        super().__init__(n_ctx=options.n_ctx, n_slots=options.n_slots)
        self.opened.append(self)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a model whose runner computes nothing. `Runner.opened` lists the runners."""
    monkeypatch.setitem(sys.modules, "vkbackend.models.engine.runner.runner", SimpleNamespace(Runner=Runner))
    monkeypatch.setattr(Runner, "opened", [])
    path = tmp_path / "none.gguf"
    path.write_bytes(
        gguf_bytes([key("general.architecture", 8, "llama"), key("tokenizer.ggml.eos_token_id", U32, 5)])
    )
    return path


def by_callers(code: CodeType) -> bool:
    return code.co_filename in CALLERS


def wait_until(holds: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + RELEASED_S
    while not holds():
        assert time.monotonic() < deadline, message
        time.sleep(0.001)


def all_released() -> bool:
    engines = [thread for thread in threading.enumerate() if thread.name == "vkbackend-engine"]
    return not engines and all(runner.closed == 1 for runner in Runner.opened)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.wide)])
def test_generate_and_stream(model: Path, stride: int) -> None:
    with LLM(model, n_ctx=64) as llm:
        options = {"temperature": 0, "ignore_eos": True}

        def stream() -> None:
            for _ in llm.stream(PROMPT, 3, **options):  # type: ignore[arg-type]
                pass

        def after() -> None:
            assert llm.generate([1, 9], 3, **options).tokens == continuation([1, 9], 3)  # type: ignore[arg-type]
            assert not llm._mailbox.channel.engine._engine.busy  # type: ignore[union-attr]

        for call in (lambda: llm.generate(PROMPT, 3, **options), stream, lambda: llm.logits(PROMPT)):  # type: ignore[arg-type]
            interrupt_everywhere(call, after, by_callers, stride=stride)


@pytest.fixture
def silent_finalizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable pytest's hook for interrupts in `__del__`. pytest's hook would keep the exception, which refers
    to the model."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


@pytest.mark.usefixtures("silent_finalizers")
def test_load(model: Path) -> None:
    released = "something is left"
    interrupt_everywhere(
        lambda: LLM(model).close(), lambda: wait_until(all_released, released), by_callers, stride=2
    )
    with LLM(model) as llm:
        assert llm.generate(PROMPT, 3, temperature=0).tokens == continuation(PROMPT, 3)


def test_close(model: Path) -> None:
    opened: list[LLM] = []

    def close_again() -> None:
        opened[-1].close()
        wait_until(all_released, "the engine's thread has not ended")
        with pytest.raises(VkbackendError, match="closed"):
            opened[-1].generate(PROMPT, 1)
        opened.append(LLM(model))

    opened.append(LLM(model))
    interrupt_everywhere(lambda: opened[-1].close(), close_again, by_callers)


@pytest.mark.usefixtures("silent_finalizers")
def test_drop(model: Path) -> None:
    """A model without references is closed even if an interrupt stops its finalizer."""
    opened: list[LLM] = []

    def after() -> None:
        wait_until(all_released, "a dropped model is left open")
        opened.append(LLM(model))

    opened.append(LLM(model))
    interrupt_everywhere(opened.clear, after, by_callers)


def test_an_exception_of_progress_ends_the_loading(model: Path) -> None:
    def refuse(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        LLM(model, progress=refuse)
    wait_until(all_released, "the model is still there")


def test_a_bug_in_a_step_ends_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    llm = LLM(model)
    monkeypatch.setattr(Runner, "launch", bug)
    for _ in range(2):
        with pytest.raises(VkbackendError, match="ZeroDivisionError: a bug"):
            llm.generate(PROMPT, 1)
    llm.close()
    assert all_released()


# ---- at random moments ----

SOME = ["numpy", "0"] if device_infos() else ["numpy"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", Tiny("qwen3", n_layer=1))


@pytest.mark.wide
@pytest.mark.parametrize("devices", SOME)
def test_study(
    tiny: Path, devices: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["interrupts", "-m", str(tiny), "-dev", devices, "-n", "8"])
    assert interrupts.main() == 0
    *_, total = capsys.readouterr().out.splitlines()
    assert int(total.split()[2]) >= 8, total


FAULTY = """
import json, os, signal, sys, time
first = int(sys.argv[-2])
for n in range(first, first + 3):
    print(json.dumps({"round": n, "phase": "decode"}), flush=True)
    if n == 1:
        time.sleep(600)
    if n == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    wrong = "wrong: [1], not [2]" if n == 0 else "left: 2" if n == 3 else ""
    print(json.dumps({"round": n, "phase": "decode", "raised": 1, "wrong": wrong}), flush=True)
"""


def test_the_study_finds_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY, encoding="utf-8")
    monkeypatch.setattr(interrupts, "ROUNDS", [sys.executable, str(script)])
    monkeypatch.setattr(sys, "argv", ["interrupts", "-n", "4", "--deadline", "2"])
    assert interrupts.main() == 1
    out, err = capsys.readouterr()
    rows = {line.split()[1]: line.split()[2:] for line in out.splitlines() if line.startswith("0 ")}
    assert rows["decode"] == ["4", "4", "1", "0", "1", "1", "1"]
    assert "hang" in err and "crash" in err and "wrong: [1]" in err


@pytest.mark.wide
def test_a_round_notices_errors(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = interrupt_rounds.Rounds(str(tiny), ["numpy"], False, str(tmp_path))
    with rounds.llm:
        assert rounds._fault_of([], 0, None) == ""
        with rounds.open():
            monkeypatch.setattr(interrupt_rounds, "RELEASED_S", 0.0)
            assert rounds._fault_of([], 0, None).startswith("left: ")
        rounds._known[0] = [0]
        assert rounds._fault_of([], 0, None).startswith("wrong: [")
    assert rounds._fault_of([], 0, None).startswith("error: ")
