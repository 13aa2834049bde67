"""Counts the instructions of plain and sparse attention for a row: `python -m
vkbackend.tools.studies.sparse_attention`.

Compiles a layer's kernels with RADV's compiler for NAVI31, which needs no GPU. The counts are thousands of
instructions of all subgroups. Each loop of a listing counts as often as it runs (measure/attention_trips.py).
Code outside loops counts once, even if a branch skips it. Workgroups that exit at once do not count. The
second number also counts each matrix multiplication as 16 instructions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from vkbackend.errors import VkbackendError
from vkbackend.limits import Limits
from vkbackend.recording import Dispatch
from vkbackend.tools.measure import attention_trips, compilers
from vkbackend.tools.measure.attention_steps import BLOCKS, DEEPSEEK, PROMPT, QUARTER, Layer, plain, sparse
from vkbackend.tools.measure.attention_trips import Shape
from vkbackend.tools.measure.dialects import listing
from vkbackend.tools.measure.loop_tree import Issued, Loop, issued, loop_tree
from vkbackend.tools.measure.turns import exit_on_errors, table

MODULE = "vkbackend.tools.studies.sparse_attention"
GPU = "NAVI31"
POSITIONS = {
    DEEPSEEK: (1024, 2048, 2049, 2304, 2560, 3072, 4096, 8192, 32_768),
    QUARTER: (1024, 2048, 2049, 2560, 3072, 4096, 8192, 32_768),
    BLOCKS: (1024, 2048, 2049, 2176, 2560, 3072, 3584, 4096, 8192, 32_768),
}
LANES = 64
MATRIX = 16  # instructions in the time of a matrix multiplication on NAVI31
HEAD = (
    "layer",
    "positions",
    "plain, one token",
    "sparse without units",
    "sparse, one token",
    "of plain",
    f"plain, prompt of {PROMPT} rows",
    "sparse, prompt",
    "of plain",
)

Kernel = tuple[str, tuple[tuple[str, int], ...]]


def of_row(
    dispatches: Sequence[Dispatch], layer: Layer, rows: int, n: int, loops: dict[Kernel, Loop]
) -> Issued:
    """Return what the subgroups issue for a row. Raises VkbackendError if a kernel's multiply-adds differ
    from its tile's."""
    total = Issued()
    for d in dispatches:
        consts = dict(d.consts)
        work = attention_trips.OF[d.op](consts, Shape(layer, rows, n, d.groups))
        subgroups = consts["LOCAL"] / LANES
        one = issued(loops[d.op, d.consts], work.trips, d.op).times(subgroups)
        if not work.macs <= one.macs <= work.macs * (1 + work.extra):
            raise VkbackendError(
                f"{d.op} {consts}: the loops have {one.macs:.0f} multiply-adds, the tile {work.macs:.0f}; "
                "correct the trips in tools/measure/attention_trips.py"
            )
        total += one.times(work.workgroups / rows)
    return total


def compiled(dispatches: Sequence[Dispatch], vendor: str, device: object) -> dict[Kernel, Loop]:
    from vkbackend.vulkan.device import VulkanDevice
    from vkbackend.vulkan.pipeline_report import report_of

    assert isinstance(device, VulkanDevice)
    wanted = {(d.op, d.consts): d for d in dispatches}
    pipelines = device.programs.pipelines(list(wanted.values()))
    texts = (report_of(device, pipeline).texts for pipeline, _ in pipelines)
    return {
        kernel: loop_tree(listing(vendor, text["Assembly"], LANES))
        for kernel, text in zip(wanted, texts, strict=True)
    }


def measure() -> Iterator[tuple[str, ...]]:
    from vkbackend.vulkan.device import open_for_report
    from vkbackend.vulkan.instance import devices, select

    info = select("0", devices())
    device = open_for_report(info)
    try:
        steps = {
            (layer, n): _steps(device.limits, layer, n) for layer, all_n in POSITIONS.items() for n in all_n
        }
        flat = [d for of in steps.values() for _, dispatches in of for d in dispatches]
        loops = compiled(flat, info.vendor, device)
        for (layer, n), of in steps.items():
            plain_1, without, sparse_1, plain_n, sparse_n = (
                of_row(dispatches, layer, rows, n, loops) if dispatches else None for rows, dispatches in of
            )
            assert plain_1 and sparse_1 and plain_n and sparse_n
            yield (
                layer.name,
                f"{n:,}",
                *map(_shown, (plain_1, without, sparse_1)),
                _ratio(sparse_1, plain_1),
                *map(_shown, (plain_n, sparse_n)),
                _ratio(sparse_n, plain_n),
            )
    finally:
        device.close()


def _steps(limits: Limits, layer: Layer, n: int) -> list[tuple[int, list[Dispatch]]]:
    """Return the rows and dispatches of the table's columns. Lists of blocks are counted on units alone."""
    without = replace(limits, features=limits.features - {"matrix_units"})
    return [
        (1, plain(limits, layer, 1, n)),
        (1, sparse(without, layer, 1, n) if layer.block == 1 else []),
        (1, sparse(limits, layer, 1, n)),
        (PROMPT, plain(limits, layer, PROMPT, n)),
        (PROMPT, sparse(limits, layer, PROMPT, n)),
    ]


def _with_units(of: Issued) -> float:
    return of.instructions + MATRIX * of.matrix


def _shown(of: Issued | None) -> str:
    if of is None:
        return ""
    both = f"{of.instructions / 1e3:,.0f}", f"{_with_units(of) / 1e3:,.0f}"
    return ", ".join(both[: 1 + (of.matrix > 0)])


def _ratio(a: Issued, b: Issued) -> str:
    return f"{a.instructions / b.instructions:.2f}, {_with_units(a) / _with_units(b):.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    with exit_on_errors():
        rows = (
            list(measure())
            if args.compile
            else compilers.ask(compilers.gpu_of(GPU), MODULE, ["--compile", "--json"])
        )
        if args.json:
            sys.stdout.write(json.dumps(rows) + "\n")
        else:
            table(f"{GPU}: thousands of instructions for a row", HEAD, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
