import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runner import DEATH, HANG, LOST, NAN, FakeRunner, continuation, open_fake, row_of
from hypothesis import given, settings
from hypothesis import strategies as st
from places import SUPPORT
from processes import is_alive, suspend
from random_cases import examples
from scheduling import GREEDY, events_of, finish, make, tokens_of
from systems import WINDOWS

from vkbackend import errors
from vkbackend.errors import DeviceLost, InvalidArgument, OutOfDeviceMemory, Timeout, VkbackendError
from vkbackend.meta.load import Progress
from vkbackend.models.engine import engine_process
from vkbackend.models.engine.answers import Mailbox
from vkbackend.models.engine.engine_process import RemoteEngine
from vkbackend.models.engine.messages import (
    Cancel,
    ErrorData,
    Generate,
    Logits,
    Memory,
    Request,
)
from vkbackend.models.options import Options
from vkbackend.models.sampling.params import SamplingParams

# ---- scheduling ----


@pytest.mark.parametrize("n_ubatch", [1, 3, 16, 64])
def test_one_request(n_ubatch: int) -> None:
    engine, runner = make(n_ubatch=n_ubatch)
    prompt = tuple(range(20))
    events = finish(engine, [Generate(7, prompt, 10, GREEDY)])[7]
    assert tokens_of(events) == continuation(prompt, 10)
    assert [e.finish_reason for e in events] == [None] * 9 + ["length"]
    assert [e.done for e in events] == [False] * 9 + [True]
    assert len(runner.steps) == -(-20 // n_ubatch) + 9
    timings = events[-1].timings
    assert timings is not None and (timings.prompt_n, timings.decode_n) == (20, 9)
    assert timings.n_reduces == 2 * len(runner.steps) and timings.prompt_s > 0 < timings.decode_s


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_concurrent_requests_get_the_same_tokens_as_alone(data: st.DataObject) -> None:
    n_ubatch = data.draw(st.integers(1, 12))
    options = {
        "n_slots": data.draw(st.integers(1, 6)), "n_ubatch": n_ubatch, "n_ctx": 24,
        "max_outputs": data.draw(st.integers(1, n_ubatch)),
        "n_in_flight": data.draw(st.integers(1, 3)),
    }  # fmt: skip
    requests: list[Request] = []
    for i in range(data.draw(st.integers(1, 9))):
        tokens = tuple(data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=24)))
        if data.draw(st.booleans()):
            limit = data.draw(st.one_of(st.none(), st.integers(0, 12)))
            params = SamplingParams(temperature=data.draw(st.sampled_from([0, 1.0])), seed=i)
            requests.append(Generate(i, tokens, limit, params, frozenset(range(4))))
        else:
            requests.append(Logits(i, tokens))
    together = finish(make(**options)[0], requests)
    again = finish(make(**options)[0], requests)
    for request in requests:
        assert not isinstance(request, Cancel)
        alone = finish(make(n_ctx=24)[0], [request])[request.id]
        crowd = together[request.id]
        assert tokens_of(crowd) == tokens_of(alone) == tokens_of(again[request.id])
        assert crowd[-1].finish_reason == alone[-1].finish_reason and crowd[-1].done
        if isinstance(request, Logits):
            rows = np.concatenate([e.logits for e in crowd if e.logits is not None])
            expected = [row_of(request.tokens[: n + 1]) for n in range(len(request.tokens))]
            assert np.array_equal(rows, expected)


def test_decoding_continues_during_a_long_prompt() -> None:
    engine, runner = make(n_slots=2, n_ubatch=8)
    engine.submit(Generate(0, (1, 2), 30, GREEDY))
    engine.step()
    engine.submit(Generate(1, tuple(range(30)), 5, GREEDY))
    for _ in range(4):  # each step has 7 prompt rows of request 1 and 1 decoded row of request 0
        assert [e.id for e in events_of(engine.step()) if e.id == 0] == [0]
        assert sorted(r.n_rows for r in runner.steps[-1]) == [1, 7]
    assert {e.id for e in events_of(engine.step())} == {0, 1}


def test_one_row_per_step_serves_all_requests() -> None:
    engine, runner = make(n_slots=3, n_ubatch=1)
    finish(engine, [Generate(i, (1 + i,) * 4, 4, GREEDY) for i in range(3)])
    slots = [runs[0].slot for runs in runner.steps]
    assert slots[:18] == [0, 1, 2] * 6


def test_requests_beyond_the_slots_queue_up_in_order() -> None:
    engine, _ = make(n_slots=2)
    order: list[int] = []
    for i in range(6):
        engine.submit(Generate(i, (i,), 3, GREEDY))
    while engine.busy:
        order += [e.id for e in events_of(engine.step()) if e.done]
    assert order == [0, 1, 2, 3, 4, 5]


def test_logits_wait_for_a_slot_and_do_not_change_others() -> None:
    engine, _ = make(n_slots=1, n_ubatch=8, max_outputs=2)
    events = finish(
        engine, [Generate(0, (1, 2), 5, GREEDY), Logits(1, (3, 4, 5)), Generate(2, (1, 2), 5, GREEDY)]
    )
    assert tokens_of(events[0]) == tokens_of(events[2]) == continuation((1, 2), 5)
    assert [len(e.logits) for e in events[1] if e.logits is not None] == [2, 1]
    assert events[1][-1].done


def test_cancel_frees_the_slot() -> None:
    engine, _ = make(n_slots=1)
    for i in range(3):
        engine.submit(Generate(i, (i,), None, GREEDY))
    engine.step()
    engine.submit(Cancel(0))  # running
    engine.submit(Cancel(1))  # waiting
    engine.submit(Cancel(99))  # unknown
    assert {e.id for e in events_of(engine.step())} == {2}


# ---- ends and errors ----


def test_context_end() -> None:
    """The model never computes the last token, so this token needs no cell."""
    for n_prompt, n_out in ((5, 4), (8, 1)):
        prompt = tuple(range(n_prompt))
        events = finish(make(n_ctx=8)[0], [Generate(0, prompt, None, GREEDY)])[0]
        assert tokens_of(events) == continuation(prompt, n_out)
        assert events[-1].finish_reason == "length"


def test_stop_ids_and_no_tokens() -> None:
    prompt = (1, 2, 3)
    third = continuation(prompt, 3)[2]
    events = finish(
        make()[0], [Generate(0, prompt, 9, GREEDY, frozenset([third])), Generate(1, prompt, 0, GREEDY)]
    )
    assert tokens_of(events[0]) == continuation(prompt, 3) and events[0][-1].finish_reason == "stop"
    assert [(e.token, e.finish_reason, e.done) for e in events[1]] == [(None, "length", True)]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((), "no tokens"),
        (tuple(range(9)), "9 tokens and the context holds 8"),
        ((-1,), "-1"),
        ((1, 50), "0..49"),
    ],
)
def test_bad_requests_end_with_an_error(tokens: tuple[int, ...], message: str) -> None:
    engine, runner = make(n_ctx=8)
    events = finish(engine, [Generate(0, tokens, 1, GREEDY), Logits(1, tokens)])
    for i in range(2):
        [event] = events[i]
        assert event.done and event.error is not None
        with pytest.raises(InvalidArgument, match=message):
            raise event.error.exception()
    assert not runner.steps


def test_logits_that_are_not_finite_end_one_request_only() -> None:
    engine, _ = make(n_slots=2)
    events = finish(engine, [Generate(0, (1, NAN), 5, GREEDY), Generate(1, (1, 2), 5, GREEDY)])
    assert events[0][-1].error is not None and "largest logit" in events[0][-1].error.message
    assert tokens_of(events[1]) == continuation((1, 2), 5)
    assert tokens_of(finish(engine, [Generate(2, (1, 2), 5, GREEDY)])[2]) == continuation((1, 2), 5)


def test_a_lost_device_ends_all_requests_for_good() -> None:
    engine, runner = make(n_slots=2)
    events = finish(engine, [Generate(i, (1, LOST if i == 1 else 2), 5, GREEDY) for i in range(4)])
    events |= finish(engine, [Generate(4, (1, 2), 5, GREEDY)])
    assert [e[-1].error.kind for e in events.values() if e[-1].error] == ["DeviceLost"] * 5
    assert len(runner.steps) == 1
    engine.close()
    engine.close()


def test_messages_are_picklable_and_errors_keep_their_type() -> None:
    for request in (Generate(1, (1, 2), None, SamplingParams(), frozenset([3])), Logits(2, (1,)), Memory(3)):
        assert pickle.loads(pickle.dumps(request)) == request
    for name in errors.__dict__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, VkbackendError):
            back = pickle.loads(pickle.dumps(ErrorData.of(kind("what happened")))).exception()
            assert type(back) is kind and str(back) == "what happened"
    full = ErrorData.of(OutOfDeviceMemory("no", requested=9, budget=5, heap=1)).exception()
    assert isinstance(full, OutOfDeviceMemory) and (full.requested, full.budget, full.heap) == (9, 5, 1)


# ---- an engine process ----


@contextmanager
def impatient() -> Iterator[None]:
    """Use these short time limits only around calls that hang."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VKBACKEND_TIMEOUT", "1")
        patch.setattr(engine_process, "CLOSE_S", 2.0)
        patch.setattr(engine_process, "ANSWER_MARGIN_S", 0.5)
        yield


def remote(options: Options, progress: Progress | None = None) -> Mailbox:
    return Mailbox(partial(RemoteEngine, options, open_=open_fake), progress)


def pid_of(mailbox: Mailbox) -> int:
    engine = mailbox.channel.engine
    assert isinstance(engine, RemoteEngine) and engine._process.pid is not None
    return engine._process.pid


def test_remote_engine() -> None:
    seen: list[tuple[int, int]] = []
    mailbox = remote(Options("a model", n_ctx=4000, n_slots=2), lambda *n: seen.append(n))
    try:
        assert (1, 2) in seen and seen[-1] == (2, 2) and mailbox.info.n_ctx == 4000
        generated = mailbox.ask(lambda id_: Generate(id_, (1, 2), 9, GREEDY))
        # Both the request and the answer are larger than a pipe's buffer.
        logits = mailbox.ask(lambda id_: Logits(id_, tuple(range(40)) * 90))
        (memory,) = mailbox.ask(Memory)
        assert tokens_of(list(generated)) == continuation((1, 2), 9)
        assert sum(len(e.logits) for e in logits if e.logits is not None) == 3600
        assert memory.memory == FakeRunner().memory()
    finally:
        mailbox.close()
    mailbox.close()


def test_remote_loading_errors_keep_their_type() -> None:
    with pytest.raises(OutOfDeviceMemory, match="9 of 5") as caught:
        remote(Options("too big"))
    assert caught.value.requested == 9
    with pytest.raises(VkbackendError, match="a bug"):
        remote(Options("bug"))


def test_a_dead_process_is_a_lost_device() -> None:
    mailbox = remote(Options("a model"))
    with pytest.raises(DeviceLost, match="exit code 3"):
        list(mailbox.ask(lambda id_: Generate(id_, (1, DEATH), 9, GREEDY)))
    with pytest.raises(DeviceLost, match="exit code 3"):
        mailbox.ask(Memory)
    mailbox.close()


def test_a_process_that_hangs_is_a_timeout() -> None:
    mailbox = remote(Options("a model"))
    with impatient():
        with pytest.raises(Timeout, match="said nothing for 2 s"):
            list(mailbox.ask(lambda id_: Generate(id_, (1, HANG), 9, GREEDY)))
        mailbox.close()


def test_close_ends_a_process_that_hangs() -> None:
    mailbox = remote(Options("a model"))
    pid = pid_of(mailbox)
    suspend(pid)
    with impatient():
        mailbox.close()
    assert not is_alive(pid)


# Processes that a shell starts in the background ignore SIGINT.
OWN_GROUP: dict[str, Any] = {} if WINDOWS else {
    "start_new_session": True, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
}  # fmt: skip
PARENT = f"""
import sys
from functools import partial
sys.path.insert(0, {str(SUPPORT)!r})
from fake_runner import SLOW, open_fake
from vkbackend.models.engine.answers import Mailbox
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.engine_process import RemoteEngine
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.options import Options

if __name__ == "__main__":
    mailbox = Mailbox(partial(RemoteEngine, Options("a model", n_ctx=10**6), open_=open_fake))
    events = iter(mailbox.ask(lambda id_: Generate(id_, (SLOW,), None, SamplingParams())))
    next(events)
    print(mailbox.channel.engine._process.pid, flush=True)
    try:
        for event in events:
            pass
    finally:
        mailbox.close()
"""


@pytest.mark.parametrize("how", [pytest.param("SIGINT", marks=pytest.mark.wide), "killed"])
def test_no_process_outlives_its_parent(tmp_path: Path, how: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        **OWN_GROUP,
    )  # fmt: skip
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_alive(child)
    if how == "SIGINT":
        os.killpg(parent.pid, signal.SIGINT)
    else:
        parent.kill()
    _, err = parent.communicate(timeout=30)
    assert ("KeyboardInterrupt" in err) == (how == "SIGINT"), err
    deadline = time.monotonic() + 30
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(child)


def test_a_script_without_a_main_guard_gets_an_error(tmp_path: Path) -> None:
    script = tmp_path / "careless.py"
    script.write_text(PARENT.replace('if __name__ == "__main__":', "if True:"), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, encoding="utf-8", timeout=180
    )
    assert result.returncode == 1 and "DeviceLost" in result.stderr and "if __name__ ==" in result.stderr
