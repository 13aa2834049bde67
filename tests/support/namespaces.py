"""Simulates nodes on one machine with network namespaces, which an isolated bridge connects. A replacement
for ssh runs commands in a namespace with a separate environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NET = "10.213.77"  # a private network that only these namespaces use
LAUNCHER = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec env -i HOME="$HOME" PATH="$PATH" {ip} netns exec {prefix}${{host##*.}} sh -c "$*"
"""


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


@cache
def unavailable() -> str:
    """Return why this machine cannot make namespaces, or an empty string if it can."""
    if not shutil.which("ip"):
        return "there is no command ip (iproute2)"
    name = f"vkprobe{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "exec", name, "ip", "link", "add", "br0", "type", "bridge")
    except (subprocess.SubprocessError, OSError) as error:
        words = getattr(error, "stderr", b"") or str(error).encode()
        return f"network namespaces are not permitted: {words.decode().strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


@dataclass
class Net:
    """The namespaces of a simulated network. `names[n]` is the namespace of node n, and mpiexec uses
    `launcher` in place of ssh."""

    names: list[str]
    launcher: Path

    def address(self, host: int) -> str:
        return f"{NET}.{host + 1}"

    def hostfile(self, path: Path, devices: list[str], *more: str) -> Path:
        lines = [f"{self.address(n)} dev={words}" for n, words in enumerate(devices)]
        common = [f"launcher={self.launcher}", "pass=VK_DRIVER_FILES,VK_ICD_FILENAMES", *more]
        path.write_text("\n".join([*common, *lines]) + "\n", encoding="utf-8")
        return path

    def command(self, host: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[host], *words]

    def cut(self, host: int) -> None:
        run("ip", "-n", self.names[host], "link", "set", "eth0", "down")

    def mend(self, host: int) -> None:
        run("ip", "-n", self.names[host], "link", "set", "eth0", "up")

    def pids(self, *names: str) -> list[int]:
        """Return the processes in namespaces. `ip netns pids` takes longer, because it is a process."""
        files = [path for name in names if (path := Path("/run/netns", name)).exists()]
        wanted, pids = {path.stat().st_ino for path in files}, []
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            with suppress(OSError):
                if os.stat(f"/proc/{pid}/ns/net").st_ino in wanted:
                    pids.append(pid)
        return pids

    def processes(self) -> dict[int, str]:
        commands = {}
        for pid in self.pids(*self.names):
            with suppress(OSError):
                commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return commands

    def manager(self, host: int) -> int:
        words = self.processes()
        return next(pid for pid in self.pids(self.names[host]) if "hydra_pmi_proxy" in words[pid].split()[0])

    def ranks(self) -> dict[int, int]:
        pids = {}
        for pid, words in self.processes().items():
            if "models.hosts.rank" in words and words.startswith(sys.executable):
                address = words.partition("--address ")[2].split()[0]
                pids[int(address.rpartition(".")[2]) - 1] = pid
        return pids


@contextmanager
def hosts(n: int, folder: Path) -> Iterator[Net]:
    """Create namespaces for n nodes. At the end, remove the namespaces and their processes. The bridge is in
    the namespace of node 0."""
    prefix = f"vk{os.getpid() % 100_000}x"
    net = Net([f"{prefix}{number + 1}" for number in range(n)], folder / "launch")
    net.launcher.write_text(LAUNCHER.format(ip=shutil.which("ip"), prefix=prefix), encoding="utf-8")
    net.launcher.chmod(0o755)
    try:
        for number, name in enumerate(net.names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            if number == 0:  # MPI never uses the bridge's own interface
                run("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
                run("ip", "-n", name, "link", "set", "bridge", "up")
            port = f"port{number}"
            run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port,
                "netns", net.names[0])  # fmt: skip
            run("ip", "-n", net.names[0], "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", name, "addr", "add", f"{net.address(number)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        yield net
    finally:
        for pid in net.processes():
            subprocess.run(["kill", "-9", str(pid)], capture_output=True, check=False)
        for name in net.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
