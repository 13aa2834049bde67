from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vkbackend import ops
from vkbackend.ops import Recorder
from vkbackend.step import Mix, Run, StepParams
from vkbackend.tools.op_cases.setup import Case, Setup, Tensor, Views, output, uniform, unused_step

# a run: first position, number of rows, cell to read, and the cell to write or a cell to write for each row
StateRun = tuple[int, ...]

# The first run writes the cell that it reads, and the second run writes another cell. The third run begins a
# new sequence, so its cell contains NaN.
RUNS: tuple[StateRun, ...] = ((5, 3, 2, 2), (9, 1, 0, 3), (0, 2, 1, 1))
# Each row of the first and the last run writes a separate cell. The last row of these runs writes the cell
# that its run reads.
ROW_RUNS: tuple[StateRun, ...] = ((5, 3, 2, 4, 5, 2), (9, 1, 0, 3), (0, 2, 1, 1), (8, 2, 6, 7, 6))


def step_of(rng: np.random.Generator, runs: tuple[StateRun, ...]) -> StepParams:
    step = unused_step(n_rows_of(runs))
    table, row = [], 0
    for i, (first_pos, n_rows, *cells) in enumerate(runs):
        table.append(Run(i, row, n_rows, first_pos, tuple(cells)))
        row += n_rows
    step.fill(rng.integers(0, 9, row), table, [], Mix.FEW if with_rows(runs) else Mix.DECODE)
    return step


def with_rows(runs: tuple[StateRun, ...]) -> bool:
    return any(len(run) > 4 for run in runs)


def states(rng: np.random.Generator, runs: tuple[StateRun, ...], *shape: int) -> Tensor:
    for i, (first_pos, _, read, *written) in enumerate(runs):
        by_others = {cell for run in runs[:i] + runs[i + 1 :] for cell in run[3:]}
        if by_others & {*written, *([read] if first_pos else [])}:  # The order of runs is undefined.
            raise ValueError(f"a run uses a cell that another run writes: {runs}")
    n_cells = max(max(run[2:]) for run in runs) + 2
    values = np.full((n_cells, *shape), np.nan, np.float32)
    for first_pos, _, read, *_ in runs:
        if first_pos:
            values[read] = rng.uniform(-1, 1, shape)
    return Tensor(values.shape, "f32", values, written=True)


def n_rows_of(runs: tuple[StateRun, ...]) -> int:
    return sum(run[1] for run in runs)


@dataclass(frozen=True)
class SsmConv(Case):
    """The last `pad` rows belong to no run."""

    width: int = 64
    d_conv: int = 4
    runs: tuple[StateRun, ...] = RUNS
    pad: int = 1
    silu: bool = True
    bias: bool = False

    def setup(self, rng: np.random.Generator) -> Setup:
        shape = (n_rows_of(self.runs) + self.pad, self.width)
        tensors = {
            "x": uniform(rng, *shape),
            "w": uniform(rng, self.width, self.d_conv),
            "state": states(rng, self.runs, self.width, self.d_conv - 1),
            "y": output(*shape),
        }
        if self.bias:
            tensors["b"] = uniform(rng, self.width)

        def record(r: Recorder, v: Views) -> None:
            args = v["x"], v["w"], v.get("b"), v["state"], v["y"], v["step"]
            r.ssm_conv(*args, silu=self.silu, row_states=with_rows(self.runs))

        return Setup(tensors, record, step_of(rng, self.runs))


@dataclass(frozen=True)
class L2Norm(Case):
    """Each row of x is followed by `gap` unused values. In row 0, the first head contains only zeros."""

    n: int = 64
    n_heads: int = 2
    rows: int = 3
    gap: int = 0

    def setup(self, rng: np.random.Generator) -> Setup:
        stride = self.n_heads * self.n + self.gap
        x = uniform(rng, self.rows, stride)
        assert x.raw is not None
        x.raw[0, : self.n] = 0
        tensors = {"x": x, "y": output(self.rows, self.n_heads, self.n)}

        def record(r: Recorder, v: Views) -> None:
            r.l2_norm(v["x"], v["y"], eps=1e-6, x_stride=stride)

        return Setup(tensors, record)


@dataclass(frozen=True)
class DeltaGates(Case):
    """Inputs include values x at which softplus(x) rounds to e^x or to x."""

    n_heads: int = 3
    width: int = 1
    rows: int = 2
    span: float = 30.0
    bound: float = 0.0

    def setup(self, rng: np.random.Generator) -> Setup:
        n = self.n_heads * self.width
        tensors = {
            "a": uniform(rng, self.rows, n, span=self.span),
            "dt": uniform(rng, n),
            "decay": Tensor((self.n_heads,), "f32", rng.uniform(-16, -0.1, self.n_heads).astype(np.float32)),
            "b": uniform(rng, self.rows, self.n_heads, span=3 * self.span),
            "g": output(self.rows, n),
            "beta": output(self.rows, self.n_heads),
        }

        def record(r: Recorder, v: Views) -> None:
            views = (v[name] for name in ("a", "dt", "decay", "b", "g", "beta"))
            r.delta_gates(*views, bound=self.bound)

        return Setup(tensors, record)

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        small = np.abs(array) < 1e-4  # An inaccurate logarithm is visible only in small values.
        # exp(x) may overflow if x is above 88, so a sigmoid below 1e-38 may be any small number. Adding 1e-30
        # hides such differences.
        return {f"{name} small": np.where(small, array + 1e-30, 0), name: np.where(small, 0, array)}


@dataclass(frozen=True)
class DeltaNet(Case):
    """There are `n_k` key heads, and `repeat` value heads share each of them. Rows of q, k and v are followed
    by `gap` unused values. A row multiplies the state by at least e^`least`."""

    tolerance: ClassVar[float] = 1e-9
    n_k: int = 2
    size: int = 16
    repeat: int = 1
    runs: tuple[StateRun, ...] = RUNS
    pad: int = 1
    kda: bool = False
    tiled: bool = False
    gap: int = 0
    least: float = -20.0

    def setup(self, rng: np.random.Generator) -> Setup:
        rows, n_heads, size = n_rows_of(self.runs) + self.pad, self.n_k * self.repeat, self.size
        tensors: dict[str, Tensor] = {}
        for name in ("q", "k"):
            heads = rng.uniform(-1, 1, (rows, self.n_k, size))
            heads /= np.sqrt((heads * heads).sum(axis=2, keepdims=True) + 1e-6)
            wide = np.full((rows, self.n_k * size + self.gap), np.nan, np.float32)
            wide[:, : self.n_k * size] = heads.reshape(rows, -1)
            tensors[name] = Tensor(wide.shape, "f32", wide)
        values = rng.uniform(-0.3, 5, (rows, n_heads * size + self.gap)).astype(np.float32)
        gates = rng.uniform(self.least, -1e-4, (rows, n_heads, size if self.kda else 1)).astype(np.float32)
        beta = rng.uniform(0, 1, (rows, n_heads)).astype(np.float32)
        tensors |= {
            name: Tensor(a.shape, "f32", a) for name, a in (("v", values), ("g", gates), ("beta", beta))
        }
        return Setup(tensors | self._outputs(rng, rows, n_heads), self._record, step_of(rng, self.runs))

    def _outputs(self, rng: np.random.Generator, rows: int, n_heads: int) -> dict[str, Tensor]:
        state = states(rng, self.runs, n_heads, self.size, self.size)
        return {"state": state, "y": output(rows, n_heads, self.size)}

    def _options(self) -> dict[str, Any]:
        n_heads = self.n_k * self.repeat
        return {
            "n_k": self.n_k,
            "tiled": self.tiled,
            "q_stride": self.n_k * self.size + self.gap,
            "v_stride": n_heads * self.size + self.gap,
        }

    def _record(self, r: Recorder, v: Views) -> None:
        args = [v[name] for name in ("q", "k", "v", "g", "beta", "state", "y", "step")]
        r.delta_net(*args, row_states=with_rows(self.runs), **self._options())


@dataclass(frozen=True)
class DeltaChunk(DeltaNet):
    def _outputs(self, rng: np.random.Generator, rows: int, n_heads: int) -> dict[str, Tensor]:
        return {"work": output(*ops.delta_work(rows, n_heads, self.size, self.kda))}

    def _record(self, r: Recorder, v: Views) -> None:
        args = [v[name] for name in ("q", "k", "v", "g", "beta", "work", "step")]
        r.delta_chunk(*args, **self._options())

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        s = self.size
        names = ("u", "w", "q", "k", "decay")
        return {part: array[..., i * s : (i + 1) * s] for i, part in enumerate(names)} | {
            "products": array[..., 5 * s :]
        }


@dataclass(frozen=True)
class DeltaScan(DeltaNet):
    tolerance: ClassVar[float] = 1e-8

    def _outputs(self, rng: np.random.Generator, rows: int, n_heads: int) -> dict[str, Tensor]:
        work = {"work": output(*ops.delta_work(rows, n_heads, self.size, self.kda))}
        return super()._outputs(rng, rows, n_heads) | work

    def _record(self, r: Recorder, v: Views) -> None:
        args = [v[name] for name in ("q", "k", "v", "g", "beta", "work", "step")]
        r.delta_chunk(*args, **self._options())
        r.delta_scan(v["work"], v["state"], v["y"], v["step"])

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        return {} if name == "work" else {name: array}


_LONG: tuple[StateRun, ...] = ((7, 65, 1, 0), (0, 20, 2, 2))


def quick() -> list[Case]:
    return [
        SsmConv(),
        SsmConv(257, 3, ((0, 1, 0, 0),), 0),
        SsmConv(65, 3, silu=False),
        SsmConv(130, 9, ((4, 40, 1, 1), (1, 16, 0, 2)), bias=True),
        SsmConv(65, 4, ROW_RUNS),
        L2Norm(),
        L2Norm(128, 3, 5, gap=7),
        L2Norm(16, 1, 1),
        DeltaGates(),
        DeltaGates(3, 32, 5),
        DeltaGates(3, 16, 5, bound=-5.0),
        DeltaNet(3, 16, 2, gap=5),
        DeltaNet(1, 128, 2, kda=True),
        DeltaNet(2, 48, 1, ROW_RUNS, 2),
        # Drivers unroll loops over a head of up to 32 values, and then compile for seconds.
        DeltaNet(2, 48, 3, tiled=True),
        DeltaChunk(2, 48, 2, _LONG, 3, tiled=True, gap=3, least=-2.0),
        DeltaChunk(2, 16, 1, _LONG, 0, kda=True),
        DeltaScan(2, 48, 2, _LONG, 3, gap=3, least=-2.0),
        DeltaScan(1, 128, 2, ((3, 70, 0, 0),), 0, tiled=True),
        DeltaScan(2, 48, 2, _LONG, 1, kda=True),
        DeltaScan(1, 128, 1, RUNS, 9, kda=True, least=-2.0),
    ]


def wide() -> list[Case]:
    cases: list[Case] = [
        SsmConv(1024, d, ((8, n, 0, 4), *RUNS), 3) for d in (3, 4, 9) for n in (1, d, 2 * d, 64)
    ]
    for kda in (False, True):
        for n_k, size, repeat in ((4, 64, 1), (4, 128, 1), (8, 32, 2), (2, 16, 3)):
            for rows in (1, 4, 33, 64, 65, 127, 200):
                for tiled in (False, True):
                    least = -20.0 if rows < 50 else -2.0
                    shape: Any = (n_k, size, repeat, ((3, rows, 1, 0), (0, 4, 2, 2)), 1, kda, tiled, 3, least)
                    cases += [DeltaNet(*shape), DeltaScan(*shape)]
    return cases
