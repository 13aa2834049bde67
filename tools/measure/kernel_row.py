"""Describes a compiled kernel by figures that exist for all vendors, as a row of count_instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from vkbackend.tools.measure.assembly import counts
from vkbackend.tools.measure.dialects import listing

# Our name -> the drivers' names of the statistic. Compilers estimate cycles differently (RADV as inverse
# throughput), so their cycles cannot be compared.
_STATISTICS: dict[str, dict[str, tuple[str, ...]]] = {
    "AMD": {
        "instructions": ("Instructions",),
        "cycles": ("Inverse Throughput",),
        "registers": ("VGPRs",),
        "waves": ("Subgroups per SIMD",),
        "spills": ("Spilled VGPRs", "Spilled SGPRs"),
        "scratch": ("Scratch size",),
    },
    "Intel": {
        "instructions": ("Instruction Count",),
        "cycles": ("Cycle Count",),
        "registers": ("Max live registers",),
        "waves": (),
        "spills": ("Spill Count",),
        "scratch": ("Scratch Memory Size",),
    },
    "NVIDIA": {
        "instructions": ("Instruction count",),
        "cycles": ("Static cycle count",),
        "registers": ("Number of GPRs",),
        "waves": ("Max warps/SM",),
        "spills": ("Spills to memory",),
        "scratch": ("SLM size",),
    },
    "Qualcomm": {
        "instructions": ("Instruction Count",),
        "registers": ("Registers used",),
        "waves": ("Max Waves Per Core",),
        "spills": ("STP Count", "LDP Count"),
    },
    "ARM": {
        "instructions": ("Instruction count", "Instructions"),
        "registers": ("Registers used", "Registers"),
        "spills": ("Spills", "Fills"),
    },
    # V3DV gives the size of the memory for spills also as the number of spills.
    "Broadcom": {
        "instructions": ("Instruction Count",),
        "waves": ("Thread Count",),
        "scratch": ("Spill Size",),
    },
    # Honeykrisp, Mesa's driver for Apple's GPUs.
    "Mesa": {
        "instructions": ("Instructions",),
        "registers": ("GPRs",),
        "spills": ("Spills", "Fills"),
        "scratch": ("Scratch",),
    },
    # Each instruction group of PowerVR has up to three operations.
    "Imagination": {
        "instructions": ("Inst group count",),
        "registers": ("Temp count",),
        "spills": ("Spill count",),
        "scratch": ("Scratch size",),
    },
}
_ASSEMBLY = {"AMD": "Assembly", "Intel": "GEN Assembly", "NVIDIA": "NAK assembly"}


@dataclass(frozen=True)
class KernelRow:
    """Figures of a kernel; None means unknown. Fields up to `scratch` (bytes for spilled registers) describe
    the complete kernel, and the other fields its hot loop. `vector` counts instructions of the subgroup's
    width."""

    gpu: str
    kernel: str
    lanes: int
    instructions: int | None
    cycles: int | None
    registers: int | None
    waves: int | None
    spills: int | None
    scratch: int | None
    vector: float | None
    matrix: int | None
    scalar: int | None
    loads: int | None
    load_nbytes: int | None  # per lane
    in_flight: int | None
    shared: int | None
    waits: int | None
    barriers: int | None
    macs: int | None  # of the complete subgroup

    @property
    def vector_per_32(self) -> float | None:
        """Return a lane's vector instructions per 32 multiply-adds."""
        return 32 * self.vector * self.lanes / self.macs if self.vector and self.macs else None


def row_of(
    gpu: str, vendor: str, kernel: str, lanes: int, statistics: Mapping[str, float], texts: Mapping[str, str]
) -> KernelRow:
    """Parse a driver's statistics and texts. If the driver chooses the subgroup size, `lanes` is 0."""
    values: dict[str, int | None] = {}
    for ours, theirs in _STATISTICS.get(vendor, {}).items():
        known = [statistics[name] for name in theirs if name in statistics]
        values[ours] = int(sum(known)) if known else None
    for name in ("instructions", "cycles", "registers", "waves", "spills", "scratch"):
        values.setdefault(name, None)
    if vendor == "Broadcom" and values["scratch"]:
        values["scratch"] -= array_nbytes(texts.get("NIR (MESA_SHADER_COMPUTE)", ""), lanes)
    listed = listing(vendor, texts.get(_ASSEMBLY.get(vendor, ""), ""), lanes or 1)
    hot = dict.fromkeys(_HOT) | {n: v for n, v in asdict(counts(listed.hot_loop())).items() if n in _HOT}
    if not any(op.kind == "vector" for op in listed.ops):  # The assembly could not be parsed.
        hot = dict.fromkeys(_HOT)
    return KernelRow(gpu, kernel, lanes, **values, **hot)


_LOCAL = re.compile(r"^    decl_var .* ([a-z]+)([0-9x]*)((?:\[\d+\])*) \S+$", re.MULTILINE)


def array_nbytes(nir: str, lanes: int) -> int:
    """Return the memory that V3DV reserves for local arrays and matrices, even if they are in registers."""
    _, _, body = nir.partition("\nimpl main")
    if "_scratch" in body:  # Some are in memory.
        return 0
    words = 0
    for name, sizes, lengths in _LOCAL.findall(body):
        sizes = f"{sizes}x{sizes}" if name == "mat" and "x" not in sizes else sizes
        words += math.prod(map(int, re.findall(r"\d+", sizes + lengths)))
    return 4 * lanes * words


_HOT = [field.name for field in fields(KernelRow)][9:]
COLUMNS = (
    "GPU",
    "kernel",
    "lanes",
    "instructions",
    "cycles",
    "registers",
    "waves",
    "spills",
    "scratch",
    "vector",
    "matrix",
    "scalar",
    "loads",
    "bytes",
    "in flight",
    "shared",
    "waits",
    "barriers",
    "vector / 32 MAC",
)


def cells(row: KernelRow) -> tuple[str, ...]:
    values: dict[str, Any] = asdict(row)
    values.pop("macs")
    shown = [*values.values(), row.vector_per_32]
    return tuple("-" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in shown)
