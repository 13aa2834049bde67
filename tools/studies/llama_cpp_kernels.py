"""Compares vkbackend's kernels with llama.cpp's, for absent GPUs: `python -m
vkbackend.tools.studies.llama_cpp_kernels -g NAVI31,BMG -t q4_0,f16`.

Builds the shaders of llama-cpp-python's source package (pip downloads it, or --sdist) with llama.cpp's
generator and glslc. Constants are from llama.cpp's host code for the GPU
(tools/measure/llama_cpp_choices.py). Attention is compared for one row after 4,095 others and for a prompt,
with heads of size 128 and 4 q heads per KV head. Compares vector instructions per 32 multiply-adds and, for
kernels with tiles, the compiler's estimated cycles. A ratio is vkbackend's figure divided by llama.cpp's, so
lower is better.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from vkbackend.ops import CACHE_TYPES
from vkbackend.ops.attention_tiles import MIN_UNIT_LANES
from vkbackend.tools.measure import compilers
from vkbackend.tools.measure.kernel_row import KernelRow
from vkbackend.tools.measure.llama_cpp_choices import (
    TYPES,
    Theirs,
    attention,
    decode,
    prefill,
)
from vkbackend.tools.measure.llama_cpp_shaders import built
from vkbackend.tools.measure.turns import exit_on_errors, table
from vkbackend.tools.studies.count_instructions import rows_of

OURS = {
    "decode 1": ("mat_dot", "mat_wave"),
    "decode 8": ("mat_dot", "mat_wave"),
    "prefill": ("mat_mul_coop", "mat_mul_dot", "mat_tile"),
    "attention 1": ("attn_decode_coop", "attn_decode"),
    "attention 512": ("attn_prefill_coop", "attn_prefill"),
}


def cases(work: str, kind: str) -> list[str]:
    if work == "attention 1":
        return [rf"AttnDecode(Coop)?\(.*4095.*n_heads=32,.*'{kind}', type_v='{kind}'"]
    if work == "attention 512":
        return [rf"AttnPrefill(Coop)?\(.*3968.*'{kind}', type_v='{kind}'"]
    if work == "prefill":
        other, rows = ("MatTile", 512) if kind == "f16" else ("MatMulDot", 128)
        return [
            f"{op}.*'{kind}', n=3072, k=1024, rows={n}," for op, n in (("MatMulCoop", 512), (other, rows))
        ]
    op = "MatWave" if kind == "f16" else "MatDot"
    return [rf"{op}\(.*'{kind}', n=3072, k=1024, rows={work.split()[1]},"]


COLUMNS = (
    "GPU",
    "work",
    "type",
    "ours",
    "vector / 32 MAC",
    "in flight",
    "registers",
    "waves",
    "spills",
    "llama.cpp's",
    "vector / 32 MAC",
    "in flight",
    "registers",
    "waves",
    "spills",
    "ratio vector",
    "ratio cycles",
)


def serves(work: str, kind: str) -> bool:
    return not work.startswith("attention") or kind in ("f16", "q8_0")


def chosen(gpu: str, work: str, kind: str) -> Theirs:
    if work == "prefill":
        return prefill(gpu, kind)
    of, rows = work.split()
    return (attention if of == "attention" else decode)(gpu, kind, int(rows))


def compare(gpu: str, kinds: Sequence[str], works: Sequence[str], modules: Path) -> list[tuple[str, ...]]:
    pairs = {(work, kind): chosen(gpu, work, kind) for kind in kinds for work in works if serves(work, kind)}
    arguments = [a for theirs in pairs.values() for a in ("--spirv", theirs.argument(modules))]
    rows = dict(zip(pairs, rows_of(gpu, arguments), strict=True))
    mine = rows_of(gpu, ["-c", "|".join(pattern for key in pairs for pattern in cases(*key))])
    lines: list[tuple[str, ...]] = []
    for (work, kind), other in rows.items():
        if row := best(mine, work, kind):
            cycles = "-"
            if work == "prefill":
                cycles = ratio(cycles_per_mac(row), cycles_per_mac(other))
            both = (row.kernel.split()[0], *shown(row, work), other.kernel, *shown(other, work))
            lines.append((gpu, work, kind, *both, ratio(vector(row, work), vector(other, work)), cycles))
    return lines


def best(rows: Sequence[KernelRow], work: str, kind: str) -> KernelRow | None:
    of, _, n_rows = work.partition(" ")
    for op in OURS[work]:
        named = [row for row in rows if row.kernel.startswith((f"{op}.", f"{op}-"))]
        if of == "attention":
            named = [row for row in named if f" K_TYPE={CACHE_TYPES.index(kind)} " in row.kernel]
        else:
            named = [row for row in named if row.kernel.split()[0].split("-")[0] == f"{op}.{kind}"]
        if op == "attn_decode_coop":
            named = [row for row in named if row.lanes >= MIN_UNIT_LANES]
        if of == "decode":
            named = [row for row in named if f" N={n_rows} " in row.kernel]
        if named:
            return max(named, key=lambda row: row.macs or 0.0)
    return None


def vector(row: KernelRow, work: str) -> float | None:
    """Return vector instructions per 32 useful multiply-adds. If a row's four heads fill 4 of the 16 rows of
    a matrix unit's operand, a quarter of the multiply-adds is useful."""
    padded = work == "attention 1" and re.search("_coop|_cm1", row.kernel)
    return row.vector_per_32 and row.vector_per_32 * (4 if padded else 1)


def shown(row: KernelRow, work: str) -> tuple[str, ...]:
    values = (vector(row, work), row.in_flight, row.registers, row.waves, row.spills)
    return tuple("-" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)


def cycles_per_mac(row: KernelRow) -> float | None:
    return row.cycles / row.macs if row.cycles and row.macs else None


def ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a and b else "-"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add(
        "-g",
        "--gpus",
        default="NAVI21,NAVI31,DG2,BMG,TURING,AMPERE",
        metavar="NAMES",
        help="default: %(default)s",
    )
    add(
        "-t",
        "--types",
        default=",".join(TYPES),
        metavar="NAMES",
        help="formats of weights and of the cache (default: %(default)s)",
    )
    add("-w", "--work", default=",".join(OURS), metavar="NAMES", help="default: %(default)s")
    add("--sdist", type=Path, metavar="FILE", help="the source package, instead of a download")
    add("--spirv", type=Path, metavar="DIR", help="llama.cpp's modules, instead of building them")
    args = parser.parse_args(argv)
    with exit_on_errors():
        gpus, kinds, works = args.gpus.upper().split(","), args.types.split(","), args.work.split(",")
        for gpu in gpus:
            compilers.gpu_of(gpu)
        wanted = [(work, kind) for work in works for kind in kinds if serves(work, kind)]
        names = {chosen(gpu, *pair).name for gpu in gpus for pair in wanted}
        modules = args.spirv or built(args.sdist, names)
        tables = (compare(gpu, kinds, works, modules) for gpu in gpus)
        table("", COLUMNS, [row for rows in tables for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
