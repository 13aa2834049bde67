"""Each node is a process in its own network namespace. Logits and states equal the results of a single node.
The loss of any node raises an error."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import namespaces
import pytest
from device_sets import one_driver, two_drivers
from oracles.fixture import write
from oracles.fixtures import build
from PIL import Image
from places import SUPPORT
from tiny_vision import write_projector

from vkbackend.meta.pulse import BEAT_S

pytest.importorskip("mpi4py")
pytestmark = [
    pytest.mark.skipif(bool(namespaces.unavailable()), reason=namespaces.unavailable() or "-"),
    pytest.mark.timeout(1200),
]

SILENCE_S = 3
# Only a hang reaches this limit. On a busy machine, starting a group took more than 100 s.
LIMIT_S = 300.0
OPTIONS = {"n_ctx": 128, "n_slots": 2, "reduce_type": "f32", "type_k": "f32", "type_v": "f32"}
PROMPT = [5, 17, 99, 3, 64, 21, 7, 80, 2, 45]
LONG = 9 * PROMPT  # this prompt is longer than a block of cells


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[namespaces.Net]:
    with namespaces.hosts(3, tmp_path_factory.mktemp("net")) as hosts:
        yield hosts


class Caller:
    def __init__(self, net: namespaces.Net, folder: Path, **wanted: Any) -> None:
        # Without these variables MPI would use shared memory between the nodes.
        more = {"UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1", "VKBACKEND_SILENCE": str(SILENCE_S)}
        words = json.dumps({"options": OPTIONS, "prompt": PROMPT} | wanted)
        self.process = subprocess.Popen(
            net.command(0, sys.executable, str(SUPPORT / "host_caller.py"), words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | more | {"VKBACKEND_TIMEOUT": "20"},
            cwd=folder,
            bufsize=0,  # otherwise select misses lines
        )

    def heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], LIMIT_S)[0], "nothing was said"
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait(LIMIT_S)}"
        return json.loads(line)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


CASES = [("llama", ["0", "0"], {"n_ubatch": 32})]  # (architecture, each node's devices, options)
WIDE = [
    ("qwen35", ["numpy", "numpy"], {}),
    ("qwen3moe", ["0,0", "0"], {"tensor_split": [3, 1, 2]}),
    ("llama", ["0", "1"], {}),
    ("qwen3moe", ["0,1", "0"], {"tensor_split": [3, 1, 2]}),
    ("llama", ["0", "0", "numpy"], {"split_mode": "layer", "tensor_split": [1, 1, 1]}),
    ("gpt-oss", ["1", "0", "0"], {"reduce_provider": "host-sum", "tensor_split": [1, 5, 2]}),
    ("gemma3", ["1", "1,0"], {"reduce_type": "bf16", "tensor_split": [1, 1, 1]}),
    ("llama", ["0", "1", "0"], {"tensor_split": [1, 0, 3]}),
    ("qwen35", ["0", "1"], {}),
    ("llama", ["0,1", "1,0"], {"split_mode": "hosts"}),
    ("qwen3", ["0", "1"], {"reduce_provider": "host-sum", "reduce_signal": "flag+event"}),
]


def check_equal(net: namespaces.Net, tmp_path: Path, cases: list[Any]) -> None:
    models = []
    for n, (name, devices, options) in enumerate(cases):
        hostfile = net.hostfile(tmp_path / f"hosts{n}", devices)
        every = ",".join(devices).split(",")
        options = {"tensor_split": [1] * len(every)} | options
        path = str(write(build(name), tmp_path / f"{n}.gguf"))
        given = {"path": path, "hostfile": str(hostfile), "devices": every, "options": options}
        given["long"] = LONG if name == "llama" else None
        given["places"] = [str(host) for host, names in enumerate(devices) for _ in names.split(",")]
        models.append(given | {"state": str(tmp_path / f"state{n}")})
    caller = Caller(net, tmp_path, when="equal", models=models)
    for name, _, options in cases:
        heard = caller.heard()
        assert heard["same"] and heard["state"], (name, options)
        assert heard["computed"] == (len(LONG) + 1 - 64 if name == "llama" else None), "64 were shared"
        assert len(heard["told"]) == len(heard["devices"])
        assert any(word.startswith("node 1 (10.") for word in heard["told"] + heard["devices"]) or options
    assert caller.process.wait(LIMIT_S) == 0
    caller.close()
    wait_until(lambda: not net.processes())


@pytest.mark.wide
@one_driver
def test_logits_and_states_equal_one_host(net: namespaces.Net, tmp_path: Path) -> None:
    check_equal(net, tmp_path, CASES)


@pytest.mark.wide
@two_drivers
def test_more_logits_and_states(net: namespaces.Net, tmp_path: Path) -> None:
    check_equal(net, tmp_path, WIDE)


@pytest.mark.wide
def test_images_on_two_hosts(net: namespaces.Net, tmp_path: Path, models: Path) -> None:
    """Node 0 has the projector."""
    image = tmp_path / "red.png"
    Image.new("RGB", (80, 50), (200, 20, 20)).save(image)
    projector = write_projector(tmp_path / "mmproj.gguf", 64)
    hostfile = net.hostfile(tmp_path / "hosts", ["numpy", "numpy"])
    files = {"path": str(models / "stories-narrow-F16.gguf"), "mmproj": str(projector), "image": str(image)}
    caller = Caller(net, tmp_path, when="image", hostfile=str(hostfile), **files)
    heard = caller.heard()
    assert heard["rows"] == [4] * 4 and heard["kept"] == [0, 1, 0, 1]
    assert all(tokens == heard["tokens"][0] for tokens in heard["tokens"])
    caller.close()


# ---- nodes that are lost ----


def check_killed_or_stopped(
    net: namespaces.Net,
    tmp_path: Path,
    when: str,
    host: int,
    number: int,
    late: float = 0.0,
    n_hosts: int = 3,
) -> None:
    """Send a signal to a node's process. Check that a typed error is raised, no process remains, and
    a new group generates the same tokens. The process manager notices the signal `late` seconds later."""
    path = str(write(build("llama"), tmp_path / "model.gguf"))
    hostfile = str(net.hostfile(tmp_path / "hosts", ["numpy"] * n_hosts))
    caller = Caller(net, tmp_path, when=when, path=path, hostfile=hostfile, again=hostfile)
    try:
        tokens = caller.heard().get("tokens")
        if when == "load":
            wait_until(lambda: len(net.ranks()) == n_hosts)
        else:
            assert caller.heard() == {"at": when}
            time.sleep(0.3)
        manager, rank = net.manager(host) if late else 0, net.ranks()[host]
        if late:
            os.kill(manager, signal.SIGSTOP)
        os.kill(rank, number)
        if late:
            time.sleep(late)
            os.kill(manager, signal.SIGCONT)
        if when == "idle":  # no call is running
            wait_until(lambda: not net.ranks())
            caller.go_on()
        error = caller.heard()
        assert error["error"] in ("DeviceLost", "Timeout"), error
        if host and number == signal.SIGKILL:
            assert f"node {host} ({net.address(host)})" in error["words"], error
        wait_until(lambda: set(net.processes()) == {caller.process.pid})
        caller.go_on()
        again = caller.heard()["again"]
        assert tokens in (None, again) and len(again) == 8
        assert caller.process.wait(LIMIT_S) == 0
    finally:
        caller.close()


@pytest.mark.wide
def test_a_cut_link(net: namespaces.Net, tmp_path: Path) -> None:
    """If the link to a node is cut, the processes on both sides end."""
    path = str(write(build("llama"), tmp_path / "model.gguf"))
    hostfile = str(net.hostfile(tmp_path / "hosts", ["numpy", "numpy"]))
    caller = Caller(net, tmp_path, when="step", path=path, hostfile=hostfile, again=hostfile)
    try:
        tokens = caller.heard()["tokens"]
        assert caller.heard() == {"at": "step"}
        net.cut(1)
        error = caller.heard()
        assert error["error"] in ("DeviceLost", "Timeout") and net.address(1) in error["words"], error
        wait_until(lambda: set(net.processes()) == {caller.process.pid})
        net.mend(1)
        caller.go_on()
        assert caller.heard()["again"] == tokens
    finally:
        net.mend(1)
        caller.close()


STRUCK = [(when, host, number) for when in ("load", "step", "idle") for host in (0, 1, 2)
          for number in (signal.SIGKILL, signal.SIGSTOP)]  # fmt: skip
SOME = [
    ("step", 2, signal.SIGKILL),
    pytest.param("idle", 1, signal.SIGSTOP, marks=pytest.mark.wide),
]
# until the process manager notices the loss, other nodes send messages to the dead process, and this crashes
# MPICH
LATE_S = 3 * BEAT_S


@pytest.mark.parametrize(("when", "host", "number"), SOME)
def test_a_killed_or_stopped_host(
    net: namespaces.Net, tmp_path: Path, when: str, host: int, number: int
) -> None:
    late = LATE_S if number == signal.SIGKILL else 0.0
    check_killed_or_stopped(net, tmp_path, when, host, number, late, n_hosts=host + 1)


@pytest.mark.wide
@pytest.mark.parametrize(("when", "host", "number"), STRUCK)
def test_more_killed_or_stopped_hosts(
    net: namespaces.Net, tmp_path: Path, when: str, host: int, number: int
) -> None:
    check_killed_or_stopped(net, tmp_path, when, host, number)
