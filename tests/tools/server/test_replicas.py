from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from places import ROOT
from scripted import ScriptedModel
from serving import HANG_S, Address, served

pytestmark = [
    pytest.mark.no_vulkan,
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def balanced(folder: Path, ports: list[int]) -> Iterator[Address]:
    port = free_port()
    text = (
        (ROOT / "docs" / "deploy" / "haproxy.cfg")
        .read_text(encoding="utf-8")
        .replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    )
    for number, replica in enumerate(ports, 8081):
        text = text.replace(f"127.0.0.1:{number}", f"127.0.0.1:{replica}")
    text = re.sub(r"inter \w+", "inter 200ms", text)
    (folder / "haproxy.cfg").write_text(text, encoding="utf-8")
    process = subprocess.Popen(["haproxy", "-db", "-f", str(folder / "haproxy.cfg")])
    try:
        end = time.monotonic() + HANG_S
        while time.monotonic() < end:
            try:
                if Address(port).request("GET", "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.1)
        yield Address(port)
    finally:
        process.terminate()
        process.wait(HANG_S)


def ask(address: Address, conversation: int, turn: int) -> int:
    first = {"role": "user", "content": f"conversation {conversation}, " * 20}
    more = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "go on"}] * turn
    body = {"messages": [first, *more], "stream": True}
    return address.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})[0]


def test_conversations_keep_their_replica_until_it_ends(tmp_path: Path) -> None:
    asked: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def model(replica: int) -> ScriptedModel:
        def script(messages: list[dict[str, object]]) -> list[str]:
            match = re.search(r"conversation (\d+)", str(messages[0]["content"]))
            asked[int(match[1]) if match else -1][replica] += 1
            return ["Yes."]

        return ScriptedModel(script=script)

    with ExitStack() as stack:
        stacks = [stack.enter_context(ExitStack()) for _ in range(3)]
        ports = [replica.enter_context(served(model(i))).port for i, replica in enumerate(stacks)]
        address = stack.enter_context(balanced(tmp_path, ports))
        for turn in range(3):
            assert [ask(address, c, turn) for c in range(12)] == [200] * 12
        homes = {c: set(replicas) for c, replicas in asked.items()}
        assert all(len(replicas) == 1 for replicas in homes.values())
        used = {next(iter(replicas)) for replicas in homes.values()}
        assert len(used) > 1, "they are spread"
        gone = min(used)
        stacks[gone].close()
        end = time.monotonic() + HANG_S
        while ask(address, 99, 0) != 200 or time.monotonic() < end - HANG_S + 1:
            assert time.monotonic() < end
            time.sleep(0.2)
        asked.clear()
        assert [ask(address, c, 3) for c in range(12)] == [200] * 12
        now = {c: next(iter(replicas)) for c, replicas in asked.items() if c >= 0 and c != 99}
        assert gone not in now.values()
        assert all(now[c] in homes[c] for c in homes if gone not in homes[c])
