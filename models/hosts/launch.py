"""A group of nodes as a child process, with the methods of `multiprocessing.Process`.

`mpiexec` starts a process per node. Node 0's process runs the engine, and connects to a socket that only this
user can open. When one process ends, MPI's process manager ends all others. A follower that receives nothing
ends itself.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from vkbackend import env
from vkbackend.errors import DeviceLost, InvalidArgument, Timeout
from vkbackend.meta.mpi import require_mpi
from vkbackend.models.hosts.hostfile import HostFile, NodeLine, secret_of
from vkbackend.models.hosts.interfaces import interface_of

START_S = 60.0  # Time for node 0's process to start.
KILL_S = 3.0  # Time for the process manager to end all processes.
# Time for all nodes to end after the first has ended. The limit is longer than rank.END_S, which a follower
# waits after its last message. The process manager cannot end a node that SIGSTOP has stopped.
END_S = 8.0
ENDED = "this node leaves the group"
SECRET = "VKBACKEND_GROUP_SECRET"  # Holds the secret if nodes share no file.
# Variables with these prefixes are passed to other nodes. Each node chooses its own drivers.
PASSED = ("VKBACKEND_", "DEBUG", "COLUMNS", "UCX_", "MPIR_", "FI_", "PYTHONFAULTHANDLER")
# mpiexec reports the end of a process in lines that begin with these words.
_MANAGER = ("=", "[mpiexec@", "[proxy:", "YOUR APPLICATION", "This typically", "Please see the FAQ")
_ENDED = re.compile(r"PID \d+ RUNNING AT (\S+)")


class GroupProcess:
    def __init__(self, hostfile: HostFile) -> None:
        require_mpi()
        self._hostfile, self._folder = hostfile, Path(tempfile.mkdtemp(prefix="vkbackend-group-"))
        self._process: subprocess.Popen[str] | None = None
        self._said: deque[str] = deque(maxlen=50)
        self._reader: threading.Thread | None = None
        self._timer: threading.Timer | None = None

    def start(self) -> Connection:
        """Return the pipe to the engine. Raises InvalidArgument, DeviceLost, Timeout."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self._folder / "engine"))
            listener.listen(1)
            environment = self.environment()
            self._process = subprocess.Popen(
                self.command(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # only the caller handles Ctrl-C
            )
            self._reader = threading.Thread(target=self._listen, name="vkbackend-mpiexec", daemon=True)
            self._reader.start()
            return self._accept(listener)
        except BaseException:
            self.kill()
            self.close()
            raise
        finally:
            listener.close()

    def _accept(self, listener: socket.socket) -> Connection:
        listener.settimeout(0.2)
        manual = self._hostfile.launcher == "manual"
        # A person types the commands, so no time limit applies.
        deadline = time.monotonic() + (1e9 if manual else START_S)
        while True:
            with suppress(TimeoutError):
                return Connection(listener.accept()[0].detach())
            if not self.is_alive():
                raise DeviceLost(f"the group did not start: {self.last_words()}")
            if time.monotonic() > deadline:
                raise Timeout(
                    f"node 0's process did not start within {START_S:.0f} s: {self.last_words()}; see that "
                    "each node can be reached by ssh without a password, or use launcher=manual"
                )

    def environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self._hostfile.secret is None:
            environment[SECRET] = secrets.token_hex(32)
        else:
            secret_of(self._hostfile.secret)
        environment["VKBACKEND_LAST"] = ""  # mpiexec of MPICH 5.0.2 drops the last variable
        return environment

    def command(self, environment: dict[str, str], leads: Sequence[str] = ()) -> list[str]:
        """Node 0 runs the module and arguments `leads` instead of the engine."""
        hostfile = self._hostfile
        beside = Path(sys.executable).parent / "mpiexec"
        mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
        if not mpiexec:
            raise InvalidArgument("there is no mpiexec; install the extra hosts, or an MPICH of your system")
        address = hostfile.addresses[0]
        interface = hostfile.lines[0].interface or interface_of(address)
        if interface is None:
            raise InvalidArgument(
                f"the first line of the hostfile is this machine, and it has no address {address}"
            )
        launcher = ["-launcher", "manual"] if hostfile.launcher == "manual" else ["-launcher", "ssh"]
        if hostfile.launcher not in ("ssh", "manual"):
            launcher += ["-launcher-exec", hostfile.launcher]
        passed = [name for name in environment if name.startswith(PASSED) or name in hostfile.passed]
        words = [mpiexec, *launcher, "-iface", interface.split(",")[-1], "-genvlist", ",".join(passed)]
        words += ["-hosts", ",".join(hostfile.addresses)]
        for number, node in enumerate(hostfile.lines):
            words += [":"] if number else []
            words += ["-n", "1", "-wdir", "/" if number else os.getcwd()]
            words += self._rank(number, node, [] if number else leads)
        return words

    def _rank(self, number: int, node: NodeLine, leads: Sequence[str]) -> list[str]:
        module, *rest = leads or ["vkbackend.models.hosts.rank"]
        words = [node.python or sys.executable, "-m", module]
        words += ["--names", ",".join(line.address for line in self._hostfile.lines)]
        words += ["--address", self._hostfile.addresses[number]]
        for flag, value in (
            ("--interface", node.interface),
            ("--secret", self._hostfile.secret),
            ("--engine", None if number or leads else str(self._folder)),
            ("--model", node.model),
        ):
            words += [flag, value] if value else []
        return words + rest

    def _listen(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        to_type = iter(self._hostfile.lines)
        for line in self._process.stdout:
            if self._hostfile.launcher == "manual" and line.startswith("HYDRA_LAUNCH"):
                if command := line.partition(": ")[2].strip():
                    env.log(0, f"run on {next(to_type).address}:\n  {command}")
                continue
            if ENDED in line or _ENDED.search(line):
                self._end_soon()
            if ENDED in line:
                continue
            self._said.append(line.rstrip())
            if env.debug() or not line.startswith(_MANAGER):
                sys.stderr.write(line)

    def _end_soon(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(END_S, self.kill)
            self._timer.daemon = True
            self._timer.start()

    def last_words(self) -> str:
        if self._reader is not None:
            self._reader.join(1.0)
        for line in self._said:
            if match := _ENDED.search(line):
                address = match[1]
                known = dict(zip(self._hostfile.addresses, self._hostfile.lines, strict=True))
                name = known[address].address if address in known else address
                number = self._hostfile.addresses.index(address) if address in known else "?"
                return f"the process of node {number} ({name}) ended first"
        said = [line for line in self._said if line.strip(" =")]
        return said[-1] if said else "it printed nothing"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exitcode(self) -> int | None:
        return self._process.poll() if self._process else None

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def join(self, timeout: float | None = None) -> None:
        if self._process:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)

    def kill(self) -> None:
        """Make the process manager end all processes. If the manager does not respond, kill it, and its
        helper processes end the nodes."""
        if not self.is_alive():
            return
        assert self._process is not None
        self._process.terminate()
        self.join(KILL_S)
        if self.is_alive():
            self._process.kill()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()
        if self._process and self._process.stdout and self._reader:
            self._reader.join(KILL_S)
            if not self._reader.is_alive():
                self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)
