"""Time all-reduces without a model. The reduces form a chain of sums, whose result is checked bit by bit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.buffer import Buffer, Home, View
from vkbackend.meta.graph import Graph
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.nodes import Nodes
from vkbackend.meta.options import ReduceOptions
from vkbackend.meta.sizing import StepShape
from vkbackend.meta.split import MIRRORED, State, partial
from vkbackend.meta.step_kind import StepKind
from vkbackend.meta.sums import add
from vkbackend.meta.tensor import Tensor
from vkbackend.runtime import Device

MAX_WIDTH = 4096
LIMIT_S = 3.0
PERIOD = 3  # Odd, so that a stale slot, which is two reduces old, makes the sum wrong.
CHAIN_NBYTES = 64 << 20  # Bytes of all reduces of a step, which has 4 to MAX_LENGTH reduces.
MAX_LENGTH = 32
REPEATS = 5  # Timed steps.


@dataclass(frozen=True, slots=True)
class ReduceTime:
    """`seconds` lists the seconds per all-reduce of each step. `exact` says whether this node's devices
    computed exact sums in all steps that were checked. `network` is the part of `seconds` for exchanges
    between nodes. On this node, `n_wrong` of `n_checked` steps had wrong sums."""

    nbytes: int
    seconds: tuple[float, ...]
    exact: bool
    network: float = 0.0
    n_wrong: int = 0
    n_checked: int = 0

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))


def chain_length(nbytes: int) -> int:
    """Return an even number of all-reduces per step, so that both parities are used equally."""
    return min(MAX_LENGTH, max(4, CHAIN_NBYTES // nbytes // 2 * 2))


def time_reduce(
    devices: Sequence[Device],
    nbytes: int,
    options: ReduceOptions | None = None,
    *,
    repeats: int = REPEATS,
    length: int = 0,
    nodes: Nodes | None = None,
    check_all: bool = True,
    limit_s: float | None = None,
) -> ReduceTime:
    """Time an all-reduce of `nbytes` (f32) over `devices`, and close them. All `nodes` must call this
    function.

    After a warm-up step, time up to `repeats` steps of `length` reduces. The sums of each step are checked,
    or only of the last step if `check_all` is not set. Checks are not timed. Without other nodes, no step
    starts after `limit_s` seconds (default: LIMIT_S).
    """
    mesh = Mesh(devices, options, nodes=nodes)
    try:
        chain = _Chain(devices, nbytes // 4, length or chain_length(nbytes))
        mesh.prepare(chain.build, StepShape(1, 0, ((0, 0),) * len(devices)))
        step = mesh.recorded_step(StepKind.of_run(1, 0))
        seconds: list[float] = []
        n_checked = 1
        mesh.run(step)
        n_wrong = int(check_all and not chain.is_exact())
        assert mesh.provider is not None
        warm_s = mesh.provider.network_s
        limit_s = LIMIT_S if limit_s is None else limit_s
        while len(seconds) < repeats and (nodes or sum(seconds) * chain.length < limit_s):
            if check_all:
                chain.turn()
            began = time.perf_counter()
            mesh.run(step)
            seconds.append((time.perf_counter() - began) / chain.length)
            if check_all:
                n_checked += 1
                n_wrong += not chain.is_exact()
        network_s = (mesh.provider.network_s - warm_s) / (len(seconds) * chain.length)
        if not check_all:
            n_wrong += not chain.is_exact()
        return ReduceTime(nbytes, tuple(seconds), not n_wrong, network_s, n_wrong, n_checked)
    finally:
        mesh.close()


class _Chain:
    """A chain of sums h[k + 1] = base[k % 3] + sum over devices of (h[k] + share[d]). The values of h repeat
    after three sums.

    All values are small integers, so sums are exact in every order and wire format. Later sums amplify an
    error. `turn` changes all signs, so the sums of the step before are wrong.
    """

    def __init__(self, devices: Sequence[Device], elements: int, length: int) -> None:
        self.devices, self.length, n = devices, length, len(devices)
        self._sign, self._uploaded = 1, list[tuple[Device, View, np.ndarray]]()
        width = min(elements, MAX_WIDTH)
        self.shape = elements // width, width
        rng = np.random.default_rng(0)
        residuals = rng.integers(-3, 4, (PERIOD, *self.shape)).astype(np.float32)
        shares = rng.integers(-4, 5, (n, *self.shape)).astype(np.float32)
        total = shares.sum(0)
        bases = [residuals[(j + 1) % PERIOD] - n * residuals[j] - total for j in range(PERIOD)]
        self.want = residuals[length % PERIOD]
        self.start = [self._upload(d, residuals[0]) for d in range(n)]
        self.share = [self._upload(d, shares[d]) for d in range(n)]
        self.base = [[self._upload(d, base) for d in range(n)] for base in bases]
        self.result = [self._upload(d, np.full(self.shape, np.nan, np.float32)) for d in range(n)]

    def _upload(self, d: int, values: np.ndarray) -> View:
        buffer: Buffer = self.devices[d].buffer(values.nbytes, Home.KV, "bench-reduce")
        view = View(buffer, 0, self.shape)
        self.devices[d].write(view, values)
        self._uploaded.append((self.devices[d], view, values))
        return view

    def turn(self) -> None:
        self._sign = -self._sign
        for device, view, values in self._uploaded:
            device.write(view, self._sign * values)

    def build(self, graph: Graph) -> None:
        everybody = partial(range(graph.n))

        def tensor(state: State, views: Sequence[View | None]) -> Tensor:
            return Tensor(graph, *self.shape, state, list(views))

        h = tensor(MIRRORED, self.start)
        share = tensor(everybody, self.share)
        bases = [tensor(MIRRORED, views) for views in self.base]
        for k in range(self.length):
            copies = tensor(everybody, h.views)
            h, _ = graph.all_reduce(add(copies, share) + bases[k % PERIOD])
        for d, recording in enumerate(graph.recordings):
            recording.copy(h.on(d), self.result[d], "result")

    def is_exact(self) -> bool:
        return all(
            np.array_equal(device.read(view).view(np.float32).reshape(self.shape), self._sign * self.want)
            for device, view in zip(self.devices, self.result, strict=True)
            if not device.node
        )
