"""`vkbackend hosts`: use several nodes as one. The hostfile lists a node per line, this machine first.

`hosts run --hostfile FILE -- COMMAND ...` runs generate, chat, serve, bench, sweep, perplexity, plan or
bench-reduce on all nodes' devices. `hosts check --hostfile FILE` shows each node's interface, ports, and
devices with their speeds. `hosts check` also shows the time of an exchange for several sizes. The flag -m
adds the speed of each possible placement of the model. Set-up: docs/hosts.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

from vkbackend.errors import InvalidArgument
from vkbackend.models.hosts.hostfile import read_hostfile
from vkbackend.models.hosts.launch import GroupProcess
from vkbackend.system.supported import require_linux

CHILD = ("generate", "chat", "serve")  # These commands run here and start the nodes as child processes.
# These commands run in the process of node 0.
INSIDE = ("bench", "sweep", "perplexity", "plan", "bench-reduce")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=("run", "check"), help="run a command, or check hosts and network")
    add("--hostfile", metavar="FILE", required=True, help="the hosts, a line for each, this machine first")
    add("-m", "--model", metavar="FILE", help="check: the model to advise on")
    parser.set_defaults(words=[])


def run(args: argparse.Namespace) -> int:
    require_linux("running on several hosts")
    if args.action == "check":
        if args.words:
            raise InvalidArgument(f"hosts check takes no command, got {args.words[0]!r}")
        more = ["-m", os.path.abspath(args.model)] if args.model else []
        return _inside(args.hostfile, ["check", *more])
    command = args.words[0] if args.words else ""
    if args.model or command not in CHILD + INSIDE:
        raise InvalidArgument(
            f"hosts run runs {', '.join(CHILD + INSIDE)}, got {command or 'nothing'!r}; write "
            "`vkbackend hosts run --hostfile FILE -- generate -m MODEL ...`"
        )
    if command in INSIDE:
        return _inside(args.hostfile, args.words)
    read_hostfile(args.hostfile)  # fails early
    words = [command, "--hostfile", os.path.abspath(args.hostfile), *args.words[1:]]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "vkbackend", *words])


def _inside(hostfile: str, words: list[str]) -> int:
    group = GroupProcess(read_hostfile(hostfile))
    environment = group.environment()
    if sys.stdout.isatty():  # the child writes to a pipe, and a pipe has no width
        environment["COLUMNS"] = str(shutil.get_terminal_size().columns)
    leads = ["vkbackend.tools.host_command", "--hostfile", os.path.abspath(hostfile), "--", *words]
    try:
        return subprocess.run(group.command(environment, leads), env=environment, check=False).returncode
    except KeyboardInterrupt:
        return 130
    finally:
        group.close()
