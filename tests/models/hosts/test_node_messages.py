"""Invalid greetings, messages and hostfiles raise typed errors."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.fixture import write
from oracles.fixtures import build
from random_cases import examples

from vkbackend.errors import DeviceLost, InvalidArgument, VkbackendError
from vkbackend.meta.pulse import Pulse
from vkbackend.meta.step_kind import StepKind
from vkbackend.meta.transport import Lane, TwinTransport
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.hosts import following, greeting, hostfile, node_messages
from vkbackend.models.hosts.group import Group
from vkbackend.models.options import Options
from vkbackend.step import MAX_ROWS

pytestmark = pytest.mark.no_vulkan

GOOD = [
    node_messages.Step([1, 2], [node_messages.RunData(0, 0, 2, 0)], [1]),
    node_messages.Step([1], [node_messages.RunData(0, 0, 1, 0, 0, 1)], [0], 0, None, True, {"rope": b"1234"}),
    node_messages.Record.of(StepKind.of_run(8, 1, 4)),
    node_messages.Record.of(StepKind.of_run(8, 1, 4)._replace(images=True, sees_end=True)),
    node_messages.Images(3, 2, b"12345678"),
    node_messages.Shift(0, 20, 40, 10, {"rope": b"1234"}),
    node_messages.Write(1, "cells.4", 0, b"1234"),
    node_messages.Read(1, "cache_k_l0", 0, 64),
    node_messages.CopyRanges(1, [node_messages.CopyData("cache_k_l0", 0, 256, 64)]),
    node_messages.AskMemory(),
    node_messages.Settle([1.0, 2.0], 3),
    node_messages.Measure(["0/0"], [4096]),
    node_messages.Open(b"{}", None),
    node_messages.End(),
]


@pytest.mark.parametrize("message", GOOD, ids=lambda m: type(m).__name__)
def test_messages_round_trip(message: Any) -> None:
    assert node_messages.decode(node_messages.encode(message), node_messages.Call, "node 0") == message


@given(st.binary(max_size=300))
def test_random_bytes_are_not_a_message(data: bytes) -> None:
    for type_ in (
        node_messages.Call,
        node_messages.Cards,
        node_messages.Likeness,
        node_messages.MemoryReport,
    ):
        try:
            node_messages.decode(data, type_, "node 1")
        except DeviceLost as error:
            assert "node 1" in str(error)


WRONG = [
    {"type": "Step", "tokens": [], "runs": [[0, 0, 1, 0]], "outputs": []},
    {"type": "Step", "tokens": [1] * (MAX_ROWS + 1), "runs": [[0, 0, 1, 0]], "outputs": []},
    {"type": "Step", "tokens": [-1], "runs": [[0, 0, 1, 0]], "outputs": []},
    {"type": "Step", "tokens": [1], "runs": [[0, 0, 0, 0]], "outputs": []},
    {"type": "Step", "tokens": [1], "runs": [[0, 0, 1, 0]], "outputs": [], "more": 1},
    {"type": "Read", "device": 1, "name": "x", "offset": -4, "nbytes": 4},
    {"type": "Read", "device": 99, "name": "x", "offset": 0, "nbytes": 4},
    {"type": "Read", "device": 1, "name": "x" * 300, "offset": 0, "nbytes": 4},
    {"type": "Read", "device": 1, "name": "x", "offset": 0, "nbytes": 1 << 40},
    {"type": "Exec", "code": "1"},
    {"type": "Settle", "tensor_split": [float("nan")], "n_gpu_layers": None},
    [1, 2, 3],
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_values_out_of_bounds(wrong: Any) -> None:
    with pytest.raises(DeviceLost, match="not a message of this version"):
        node_messages.decode(node_messages.encode(wrong), node_messages.Call, "node 0")


# ---- calls ----


class Follower:
    """A runner on node 1, to which the test sends calls as node 0 would."""

    def __init__(self, path: Path) -> None:
        self.led, self.here = TwinTransport.group(2)
        groups = Group(self.led, pulse=False), Group(self.here, pulse=False)
        options = Options.of(path, devices=["0/numpy", "1/numpy"], tensor_split=[1, 1], n_ctx=64, n_slots=2)
        runners: list[Runner] = []
        thread = threading.Thread(
            target=lambda: runners.append(Runner(options, group=groups[0])), daemon=True
        )
        thread.start()
        groups[1].expect(node_messages.Open, 30)
        self.group, self.runner = groups[1], Runner(options, group=groups[1])
        thread.join(30)

    def obey(self, call: Any) -> None:
        following.obey(
            self.group,
            self.runner,
            node_messages.decode(node_messages.encode(call), node_messages.Call, "node 0"),
        )


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Follower:
    return Follower(write(build("qwen35"), tmp_path_factory.mktemp("model") / "model.gguf"))


RUN = node_messages.RunData(0, 0, 1, 0, 0, 0)
UNFIT = [
    node_messages.Step([128], [RUN], []),
    node_messages.Step([1], [RUN], [1]),
    node_messages.Step([1, 2], [RUN], []),
    node_messages.Step([1], [node_messages.RunData(2, 0, 1, 0, 0, 0)], []),
    node_messages.Step([1], [node_messages.RunData(0, 1, 1, 0, 0, 0)], []),
    node_messages.Step([1], [node_messages.RunData(0, 0, 1, 64, 0, 0)], []),
    node_messages.Step([1], [node_messages.RunData(0, 0, 1, (1 << 32) - 1, 0, 0)], []),
    node_messages.Step([1], [node_messages.RunData(0, 0, 1, 0, 99, 0)], []),
    node_messages.Step([1], [node_messages.RunData(0, 0, 1, 0, 0, 99)], []),
    node_messages.Step([1], [node_messages.RunData(0, 0, 1, 0, 0, 0, [(0, 1.0)])], []),  # no adapters
    node_messages.Record(1, 1, 1, 0, False, False, False, adapters=1),
    node_messages.Step([1], [RUN], [0], 7),
    node_messages.Step([1], [RUN], [0], 0, b"1234"),
    node_messages.Step([1], [RUN], [0], 0, None, False, {"other": b"1234"}),
    node_messages.Step([1] * 200, [node_messages.RunData(0, 0, 200, 0, 0, 0)], []),
    node_messages.Images(0, 1, b"1234"),  # the model was loaded without a projector
    node_messages.Step([1], [RUN], [0], images=True),
    node_messages.Step([1], [node_messages.RunData(0, 0, 1, 0, 0, 0, end=1)], [0]),
    node_messages.Record(1, 1, 1, 0, False, False, False, images=True),
    node_messages.Shift(0, 20, 40, 10, {}),  # the model was loaded without context_shift
    node_messages.Record(200, 0, 1, 0, False, False, False),
    node_messages.Record(1, 1, 1, 9, False, False, False),
    node_messages.Record(1, 1, 1, 1, False, False, False, hidden=True),
    node_messages.Record(1, 200, 1, 0, False, False, False, hidden=True),
    node_messages.Step([1], [RUN], [0], 1, hidden=True),
    node_messages.Record(1, 1, 1, 0, False, True, False),
    node_messages.Record(1, 1, 1, 0, False, False, False, True),  # the model was loaded without a head
    node_messages.Step([1], [RUN], [0], 0, None, False, None, True),
    node_messages.Read(0, "cells.4", 0, 4),  # this cache is on another node
    node_messages.Read(1, "nothing", 0, 4),
    node_messages.Read(1, "cells.4", 2, 4),
    node_messages.Read(1, "cells.4", 0, 6),
    node_messages.Read(1, "cells.4", 0, 1 << 20),
    node_messages.Read(1, "cells.4", 1 << 40, 4),
    node_messages.Write(1, "cells.4", 1 << 40, b"1234"),
    node_messages.Write(1, "cells.4", 0, b""),
    node_messages.CopyRanges(1, [node_messages.CopyData("cells.4", 0, 1 << 30, 4)]),
    node_messages.Settle(None, None),
    node_messages.Open(b"{}", None),
]


@pytest.mark.parametrize("call", UNFIT, ids=str)
def test_calls_that_do_not_fit(follower: Follower, call: Any) -> None:
    with pytest.raises(DeviceLost, match="does not fit"):
        follower.obey(call)


small = st.integers(-2, 70) | st.sampled_from([0, 1, 4, 64, 1 << 31, (1 << 32) - 1, 1 << 62])


@settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_random_calls(follower: Follower, data: st.DataObject) -> None:
    """The node executes or refuses a random call. Nothing else in the process changes. Valid steps are
    excluded, because they would wait for devices of node 0."""
    name = data.draw(st.sampled_from(["cells.4", "cache_k_l3", "state_conv_l0", "x"]))
    draw = lambda: data.draw(small)  # noqa: E731
    wanted = data.draw(st.sampled_from(["Read", "Write", "CopyRanges", "Step"]))
    words: dict[str, Any] = {"type": wanted, "device": draw(), "name": name, "offset": draw()}
    if wanted == "Read":
        words["nbytes"] = draw()
    elif wanted == "Write":
        words["data"] = data.draw(st.binary(max_size=80))
    elif wanted == "CopyRanges":
        words = {"type": wanted, "device": draw(), "copies": [[name, draw(), draw(), draw()]]}
    else:
        run = [draw(), draw(), draw(), draw(), draw(), draw()]
        words = {"type": wanted, "tokens": [draw(), draw(), 128], "runs": [run], "outputs": [draw()]}
    device = follower.runner.mesh.devices[1]
    counts = dict(device.counts)
    try:
        call = node_messages.decode(node_messages.encode(words), node_messages.Call, "node 0")
        following.obey(follower.group, follower.runner, call)
    except DeviceLost:
        pass
    while follower.led.poll(1, Lane.REPLY, node_messages.MAX_REPLY_NBYTES) is not None:
        pass
    assert dict(device.counts) == counts


def test_a_message_that_is_too_long_is_refused() -> None:
    led, follows = TwinTransport.group(2)
    led.send(1, Lane.CALL, b"x" * 100)
    with pytest.raises(DeviceLost, match="node 0 sent a call of 100 bytes, more than the limit of 99"):
        follows.poll(0, Lane.CALL, 99)


# ---- greetings ----


def greet(first: bytes, second: bytes, tamper: Any = None) -> list[BaseException | None]:
    transports = TwinTransport.group(2)
    if tamper:
        tamper(transports)
    errors: list[BaseException | None] = [None, None]

    def greeter(n: int, secret: bytes) -> None:
        try:
            greeting.greet(transports[n], secret)
        except VkbackendError as error:
            errors[n] = error
            transports[1 - n].lost = str(error)

    threads = [threading.Thread(target=greeter, args=pair) for pair in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return errors


def test_hosts_with_one_secret() -> None:
    assert greet(b"s" * 32, b"s" * 32) == [None, None]


def test_a_host_with_another_secret() -> None:
    led, followed = greet(b"s" * 32, b"t" * 32)
    assert "does not know the group's secret" in str(led) and followed is not None


def test_a_greeting_that_is_sent_back() -> None:
    def mirror(transports: list[TwinTransport]) -> None:
        send = transports[1].send
        transports[1].send = lambda host, lane, data, name="": send(host, lane, data[:32] + data[:32])  # type: ignore

    led, _ = greet(b"s" * 32, b"t" * 32, mirror)
    assert "does not know the group's secret" in str(led)


def test_silence_and_last_words() -> None:
    led, follows = TwinTransport.group(2)
    lost = threading.Event()
    pulse, other = Pulse(led, 1.0), Pulse(follows, 1.0)
    pulse.on_lost = lost.set
    assert not lost.wait(1.6)
    other.close()
    assert lost.wait(10) and "node 1 has sent no heartbeat for 1 s" in led.lost
    with pytest.raises(DeviceLost, match="node 1 has sent no heartbeat"):
        led.wait(lambda: False, "something")
    led, follows = TwinTransport.group(2)
    Group(follows, pulse=False).fail("GGUFError: no file")
    pulse = Pulse(led, 30.0)
    pulse._thread.join(10)
    assert led.lost == "node 1 failed: GGUFError: no file"


# ---- hostfiles ----


def test_a_hostfile() -> None:
    text = """# two machines
    launcher=manual secret=/etc/secret pass=A,B
    127.0.0.1 dev=0,1
    10.0.0.2 dev=numpy model="/data/a model.gguf" interface=eth1  # slower
    """
    hosts = hostfile.parse_hosts(text, "hosts")
    assert hosts.places == ("0/0", "0/1", "1/numpy") and hosts.addresses == ("127.0.0.1", "10.0.0.2")
    assert (hosts.launcher, hosts.secret, hosts.passed) == ("manual", "/etc/secret", ("A", "B"))
    assert hosts.lines[1].model == "/data/a model.gguf" and hosts.lines[1].interface == "eth1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10.0.0.1 dev=0", "two nodes or more"),
        ("10.0.0.1\n10.0.0.2 dev=" + ",".join("0" * 40), "devices"),
        ("10.0.0.1\n10.0.0.2 devices=0", "line 2: 'devices=0' is none of dev="),
        ("10.0.0.1\n10.0.0.2 dev=0 dev=1", "line 2"),
        ("10.0.0.1\n10.0.0.2 'dev=0", "line 2"),
        ("launch=ssh\n10.0.0.1\n10.0.0.2", "launcher="),
        ("10.0.0.1\n8.8.8.8", "not a private address"),
        ("10.0.0.1\n0.0.0.0", "not a private address"),
        ("10.0.0.1\n-oProxyCommand", "not an address"),
        ("public=maybe\n10.0.0.1\n10.0.0.2", "public"),
    ],
)
def test_invalid_hostfiles(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        hostfile.parse_hosts(text, "hosts")


def test_public_addresses_with_public_yes() -> None:
    assert hostfile.parse_hosts("public=yes\n8.8.8.8\n10.0.0.2", "hosts").addresses[0] == "8.8.8.8"
    assert hostfile.is_private("100.100.1.1") and hostfile.is_private("fd00::1")


def test_secrets_that_others_may_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * 32)
    path.chmod(0o644)
    with pytest.raises(InvalidArgument, match="others may read it"):
        hostfile.secret_of(str(path))
    path.chmod(0o600)
    assert hostfile.secret_of(str(path)) == b"x" * 32
    path.write_bytes(b"short")
    with pytest.raises(InvalidArgument, match="16 to 4096"):
        hostfile.secret_of(str(path))


def test_a_hostfile_names_the_devices() -> None:
    assert Options.of("m.gguf", hostfile="hosts", tensor_split=[3, 1]).hostfile == "hosts"
    with pytest.raises(InvalidArgument, match="which devices each node has"):
        Options.of("m.gguf", hostfile="hosts", devices=["0"])


def test_the_largest_message_is_within_the_limits() -> None:
    """A call can contain the masks of 512 rows for a vocabulary of 262,144 tokens."""
    masks = np.zeros((512, 262_144 // 32), np.uint32).tobytes()
    call = node_messages.Step([1], [RUN], [0], 1, masks)
    data = node_messages.encode(call)
    assert (
        len(data) <= node_messages.MAX_CALL_NBYTES
        and node_messages.decode(data, node_messages.Call, "node 0") == call
    )
