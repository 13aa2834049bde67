"""Counts a kernel's instructions by class, its loads in flight, its loops and its multiply-adds. dialects.py
parses each vendor's assembly.

A 32-lane instruction counts twice in a 16-lane subgroup. The hot loop is the smallest loop with more than
half of the multiply-adds in loops. Only the fastest kind of multiply-adds in the kernel counts: on matrix
units, else in integer dot products, else in floats. Instructions of inner loops count once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Op:
    """An instruction. It counts as `weight` instructions of the subgroup's width. `nbytes` is per lane, and
    `macs` per subgroup."""

    name: str
    kind: str  # vector, scalar, matrix, load, store, shared, wait, barrier, branch
    weight: float = 1.0
    nbytes: int = 0
    macs: int = 0
    power: int = 0  # kind of multiply-adds: 3 matrix units, 2 integers, 1 floats
    target: str = ""
    token: str = ""  # The token that this load sets when it has finished.
    waits: tuple[str, ...] = ()  # Tokens to wait for. "<n" waits until at most n loads are in flight.


@dataclass(frozen=True)
class Listing:
    ops: tuple[Op, ...]
    loops: tuple[Sequence[int], ...]  # as indices of instructions

    def hot_loop(self) -> Sequence[Op]:
        """Return the hot loop, or all instructions if no loop multiplies."""
        power = max((op.power for op in self.ops), default=0)
        looped = {i for loop in self.loops for i in loop}
        whole = sum(self.ops[i].macs for i in looped if self.ops[i].power == power)
        done = [sum(self.ops[i].macs for i in r if self.ops[i].power == power) for r in self.loops]
        fits = [loop for loop, macs in zip(self.loops, done, strict=True) if macs > whole / 2]
        if not whole or not fits:
            return self.ops
        return [self.ops[i] for i in min(fits, key=len)]


@dataclass(frozen=True)
class Counts:
    vector: float
    matrix: int
    scalar: int
    loads: int
    load_nbytes: int  # Per lane.
    in_flight: int  # Maximum number of memory loads in flight.
    stores: int
    shared: int
    waits: int
    barriers: int
    macs: int  # The number of multiply-adds of the fastest kind, per subgroup.


def counts(ops: Sequence[Op]) -> Counts:
    kinds = {
        kind: [op for op in ops if op.kind == kind]
        for kind in ("vector", "matrix", "scalar", "load", "store", "shared", "wait", "barrier")
    }
    power = max((op.power for op in ops), default=0)
    return Counts(
        vector=sum(op.weight for op in kinds["vector"]),
        matrix=len(kinds["matrix"]),
        scalar=len(kinds["scalar"]),
        loads=len(kinds["load"]),
        load_nbytes=sum(op.nbytes for op in kinds["load"]),
        in_flight=in_flight(ops),
        stores=len(kinds["store"]),
        shared=len(kinds["shared"]),
        waits=len(kinds["wait"]),
        barriers=len(kinds["barrier"]),
        macs=sum(op.macs for op in ops if op.power == power),
    )


def in_flight(ops: Sequence[Op]) -> int:
    under_way: list[str] = []
    most = 0
    for op in ops:
        for wait in op.waits:
            if wait.startswith("<"):
                under_way = under_way[max(0, len(under_way) - int(wait[1:])) :]
            else:
                under_way = [token for token in under_way if token != wait]
        if op.kind == "load":
            under_way.append(op.token)
            most = max(most, len(under_way))
    return most


@dataclass(frozen=True)
class Block:
    """A basic block, from compilers that name predecessors. These compilers may write a loop's blocks far
    apart."""

    index: int
    reached_from: tuple[int, ...]
    start: int = 0


def natural_loops(blocks: Sequence[Block], n_ops: int) -> Iterator[Sequence[int]]:
    """Yield the ops of every natural loop. The loop contains all blocks that reach its back edge without
    passing the edge's target."""
    by_index = {block.index: block for block in blocks}
    ends = {a.index: b.start for a, b in pairwise(blocks)} | {blocks[-1].index: n_ops} if blocks else {}
    for head in blocks:
        for source in head.reached_from:
            if source < head.index:
                continue
            body, waiting = {head.index}, [source]
            while waiting:
                if (index := waiting.pop()) not in body:
                    body.add(index)
                    waiting += by_index[index].reached_from
            yield [i for index in sorted(body) for i in range(by_index[index].start, ends[index])]
