"""Controls a device with kp. Only this file imports kp.

The script's argument is the number of an inherited socket. Requests are pickled tuples of a `Worker` method's
name and arguments. Answers are ("ok", value) or ("error", text). The process ends when the socket is closed.
To start quickly, this file imports no other module of vkbackend.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import kp
import numpy as np

# Module number, specialization constants, workgroups, tensor numbers.
Key = tuple[int, tuple[int, ...], tuple[int, int, int], tuple[int, ...]]
Command = tuple[Key, bytes] | None  # An algorithm and push constants, or None for a barrier.
Span = tuple[int, int, int]  # Tensor number, first word, end.
BEAT_IN, BEAT_OUT = -1, -2  # Tensors of one word.


class Worker:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._modules: dict[int, bytes] = {}
        self._tensors: dict[int, Any] = {}
        self._mapped: dict[int, np.ndarray] = {}  # Mapped words of host-visible tensors.
        self._shared: dict[int, np.ndarray] = {}  # Words shared with the parent process.
        self._algorithms: dict[Key, Any] = {}
        self._executables: dict[int, tuple[list[list[Any]], Sequence[tuple[list[Span], list[Span]]]]] = {}
        self._beat = 0

    def open(self, index: int, family: int, copy_words: bytes) -> str:
        """Return the device's name. `copy_words` is the SPIR-V of module 0."""
        self._manager = kp.Manager(index, [family], [])
        self._modules[0] = copy_words
        word = np.zeros(1, np.uint32)
        self._token = self._manager.tensor_t(word, kp.TensorTypes.device)
        for number in (BEAT_IN, BEAT_OUT):
            self._tensors[number] = self._manager.tensor_t(word, kp.TensorTypes.host)
            self._mapped[number] = self._tensors[number].data()
        return str(self._manager.get_device_properties()["device_name"])

    def module(self, number: int, code: bytes) -> None:
        self._modules[number] = code

    def tensor(self, number: int, n_words: int, host: bool, shared: bool) -> None:
        """Allocate a tensor. If `shared`, a file descriptor that both processes map follows the request."""
        # Receive the descriptor before an error can occur. Otherwise a later request would receive the
        # descriptor.
        fds = socket.recv_fds(self._sock, 1, 1)[1] if shared else []
        try:
            kind = kp.TensorTypes.host if host else kp.TensorTypes.storage
            tensor = self._manager.tensor_t(np.zeros(n_words, np.uint32), kind)
            for fd in fds:
                self._shared[number] = np.frombuffer(mmap.mmap(fd, 4 * n_words), np.uint32)
            self._tensors[number] = tensor
            if host:
                self._mapped[number] = tensor.data()
        finally:
            for fd in fds:
                os.close(fd)

    def free(self, number: int) -> None:
        for key in [key for key in self._algorithms if number in key[3]]:
            self._algorithms.pop(key).destroy()
        self._mapped.pop(number, None)
        self._shared.pop(number, None)
        self._tensors.pop(number).destroy()

    def build(
        self,
        number: int,
        segments: Sequence[Sequence[Sequence[Command]]],
        spans: Sequence[tuple[list[Span], list[Span]]],
        timed: bool,
    ) -> None:
        """Record a kp sequence for each submission. `spans` lists the words of shared tensors that each
        segment reads and writes."""
        self._executables[number] = [[self._sequence(part, timed) for part in s] for s in segments], spans

    def _sequence(self, commands: Sequence[Command], timed: bool = False) -> Any:
        sequence = self._manager.sequence(0, len(commands) + 1 if timed else 0)
        for command in commands:
            if command is None:
                sequence.record(kp.OpTensorSyncLocal([self._token]))
            else:
                self._dispatch(sequence, *command)
        self._dispatch(sequence, (0, (1,), (1, 1, 1), (BEAT_IN, BEAT_OUT)), np.array([0, 0, 1], np.uint32))
        return sequence

    def _dispatch(self, sequence: Any, key: Key, push: bytes | np.ndarray) -> None:
        words = np.frombuffer(push, np.uint32)
        if key not in self._algorithms:
            module, consts, groups, numbers = key
            tensors = [self._tensors[number] for number in numbers]
            self._algorithms[key] = self._manager.algorithm(
                tensors, self._modules[module], list(groups), np.array(consts, np.uint32), words
            )
        sequence.record(kp.OpAlgoDispatch(self._algorithms[key], words))

    def run(self, number: int, segment: int) -> None:
        sequences, spans = self._executables[number]
        self._run(sequences[segment], *spans[segment])

    def once(self, commands: Sequence[Command], reads: list[Span], writes: list[Span]) -> None:
        sequence = self._sequence(commands)
        self._run([sequence], reads, writes)
        sequence.destroy()

    def _run(self, sequences: Sequence[Any], reads: list[Span], writes: list[Span]) -> None:
        for tensor, begin, end in reads:
            self._mapped[tensor][begin:end] = self._shared[tensor][begin:end]
        for sequence in sequences:
            # kp ignores errors when it submits and waits. So each sequence ends with a command that copies a
            # new number from one word to another. If the number does not arrive, the sequence did not run.
            self._beat = (self._beat + 1) & 0xFFFFFFFF
            self._mapped[BEAT_IN][0] = self._beat
            sequence.eval()
            if self._mapped[BEAT_OUT][0] != self._beat:
                raise RuntimeError("a submission did not run to its end")
        for tensor, begin, end in writes:
            self._shared[tensor][begin:end] = self._mapped[tensor][begin:end]

    def times(self, number: int) -> list[list[int]]:
        """Return the last run's timestamps of each submission: at its start and after every command."""
        return [sequence.get_timestamps()[:-1] for part in self._executables[number][0] for sequence in part]

    def drop(self, number: int) -> None:
        for part in self._executables.pop(number)[0]:
            for sequence in part:
                sequence.destroy()

    def close(self) -> None:
        for number in list(self._executables):
            self.drop(number)
        for item in (*self._algorithms.values(), *self._tensors.values(), self._token, self._manager):
            item.destroy()


def main() -> None:
    # Ctrl-C also signals this process, but the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    conn = Connection(os.dup(sock.fileno()))
    worker = Worker(sock)
    name = ""
    while name != "close":
        try:
            name, *args = pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            break  # the parent has ended
        try:
            answer = "ok", getattr(worker, name)(*args)
        except Exception as error:
            answer = "error", f"{type(error).__name__}: {error}"
        conn.send_bytes(pickle.dumps(answer))
    sys.stderr.flush()
    os._exit(0)  # a normal exit would destroy kp's objects in arbitrary order


if __name__ == "__main__":
    main()
