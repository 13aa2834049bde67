"""The process of one node, which MPI starts with `python -m vkbackend.models.hosts.rank`.

Node 0's process runs the engine, and has a socket to its caller.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from vkbackend import env
from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.meta.load import Progress
from vkbackend.meta.mpi import MPITransport
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.engine_process import serve
from vkbackend.models.hosts.following import follow
from vkbackend.models.hosts.greeting import greet
from vkbackend.models.hosts.group import Group
from vkbackend.models.hosts.hostfile import secret_of
from vkbackend.models.hosts.interfaces import interface_of, listening_ports
from vkbackend.models.hosts.launch import ENDED, SECRET
from vkbackend.models.options import Options

END_S = 5.0  # a process of a lost group ends itself after this time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag in ("--names", "--address", "--interface", "--secret", "--engine", "--model"):
        parser.add_argument(flag)


def arrive(args: argparse.Namespace) -> Group:
    secret = secret_of(args.secret) if args.secret else bytes.fromhex(os.environ.pop(SECRET, ""))
    if len(secret) < 16:
        raise InvalidArgument("this process belongs to a group and got no secret; start the group again")
    end_after_the_cause()
    interface = args.interface or interface_of(args.address)
    force_interface(interface, args.address)
    transport = MPITransport()
    transport.names = [f"node {n} ({name})" for n, name in enumerate(args.names.split(","))]
    where = f"{interface}, listens on {', '.join(listening_ports())}"
    env.log(1, f"{transport.names[transport.rank]}: {transport.library} on {where}")
    greet(transport, secret)
    return Group(transport, where=where)


def main() -> int:
    parser = argparse.ArgumentParser(description="One node of a group; started by `vkbackend hosts run`.")
    add_arguments(parser)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when to end
    group = arrive(args)
    if group.leads:
        _lead(group, args.engine)
    else:
        group.on_lost(lambda _: _end_soon())
        try:
            follow(group, args.model)
        except Exception:
            # The manager ends all processes when one ends, so node 0 must receive the reason first.
            time.sleep(END_S)
            raise
    group.leave()
    return 0


def end_after_the_cause() -> None:
    """Delay the end of this process after a crash. MPICH 5.0.2 crashes when it sends to a process that has
    ended. The process manager names the first process that ended. This should be the process that caused the
    failure.

    The handler is glibc's `sleep`, which takes the signal's number as seconds (SIGABRT 6, SIGBUS 7, SIGSEGV
    11). Then the same fault ends the process. The process manager ends the other nodes within milliseconds,
    before the sleep is over.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "sysv_signal"):
        return
    libc.sysv_signal.argtypes = ctypes.c_int, ctypes.c_void_p
    enabled = faulthandler.is_enabled()
    faulthandler.disable()
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        libc.sysv_signal(number, ctypes.cast(libc.sleep, ctypes.c_void_p))
    if enabled:
        faulthandler.enable()  # after its own work, faulthandler calls the previous handler


def force_interface(interface: str | None, address: str) -> None:
    """Make MPI use this network interface, because MPI may choose Wi-Fi."""
    if interface is None:
        raise InvalidArgument(
            f"this node has no address {address}; name it as the hostfile does, or its interface"
        )
    os.environ.setdefault("UCX_NET_DEVICES", interface)
    os.environ.setdefault("FI_TCP_IFACE", interface.split(",")[-1])


def _lead(group: Group, folder: str) -> None:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(Path(folder) / "engine"))
        conn = Connection(caller.detach())
    options: Options = conn.recv()

    def open_(options: Options, progress: Progress | None) -> Engine:
        return Engine.open(options, progress, group)

    serve(conn, options, open_, group.on_lost)


def _end_soon() -> None:
    env.log(0, ENDED)
    timer = threading.Timer(END_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def run(main: Callable[[], int] = main) -> None:
    """Run `main` and exit immediately, because a normal exit waits in MPI for nodes that have ended."""
    code = 1
    try:
        code = main()
    except VkbackendError as error:
        env.log(0, f"{type(error).__name__}: {error}")
    except BaseException:
        traceback.print_exc()
    if code:
        env.log(0, ENDED)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
