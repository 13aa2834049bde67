"""Our products beside llama.cpp's, through the compilers of GPUs that are not there:
`python -m vkbackend.tools.studies.llama_cpp_kernels -g NAVI31,BMG -t q4_0,f16`.

llama.cpp's shaders come out of the source package of llama-cpp-python (pip downloads it, or --sdist), built
by its own generator with glslc, and get the constants that its host code chooses for such a GPU (`decode` and
`prefill` below, read in ggml-vulkan.cpp of 0.3.36). Ratios are ours to theirs, of vector instructions for 32
multiply-adds and of the compiler's estimated cycles for one (tiles alone: around other loops they say
nothing). Below 1 is better.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vkbackend.errors import UnsupportedFeature, VkbackendError
from vkbackend.tools.measure import compilers
from vkbackend.tools.measure.kernel_row import KernelRow
from vkbackend.tools.measure.turns import errors_told, table
from vkbackend.tools.studies.count_instructions import rows_of

VERSION = "0.3.36"
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "llama.cpp"
SHADERS = "vendor/llama.cpp/ggml/src/ggml-vulkan/vulkan-shaders"
SOURCES = (
    "mul_mat_vec",
    "mul_mat_vecq",
    "mul_mat_vec_q4_k",
    "mul_mat_vec_q6_k",
    "mul_mat_vec_iq4_xs",
    "mul_mm",
    "mul_mmq",
    "mul_mmq_cm1",
)
TYPES = ("q4_0", "q4_k", "q8_0", "q6_k", "iq4_xs", "mxfp4", "f16")
GGML_TYPES = {"q4_0": 2, "q8_0": 8, "q4_k": 12, "q6_k": 14, "iq4_xs": 23, "mxfp4": 39}


@dataclass(frozen=True)
class Theirs:
    """A shader of llama.cpp as it runs: its module, specialization constants from 0 on, subgroup size."""

    name: str
    consts: tuple[int, ...]
    lanes: int
    more: tuple[tuple[int, int], ...] = ()  # constants by id

    def argument(self, folder: Path) -> str:
        pairs = [*enumerate(self.consts), *self.more]
        return f"{folder / self.name}.spv:{','.join(f'{a}={b}' for a, b in pairs)}:{self.lanes}"


# ---- what llama.cpp chooses ----

# GPU -> (lanes of products with few rows, of those in floats on Intel), as its host code asks for.
_LANES = {
    "NAVI21": 32,
    "NAVI31": 64,
    "GFX1201": 64,
    "TGL": 16,
    "DG2": 16,
    "BMG": 16,
    "TURING": 32,
    "AMPERE": 32,
}


def decode(gpu: str, kind: str, rows: int) -> Theirs:
    """mul_mat_vec: of x in 8 bits where ggml_vk_should_use_mmvq says so for k of 4,096, else of floats."""
    driver, lanes = compilers.GPUS[gpu].driver, _LANES[gpu]
    if kind == "f16":
        return Theirs("mul_mat_vec_f16_f32_f32_subgroup_no_shmem", (lanes, 2, rows), lanes)
    in_floats = {"radv": ("q8_0",), "anv": ("q4_0", "iq4_xs"), "nvk": TYPES}[driver]
    if (driver != "anv" and kind == "q6_k") or (rows == 1 and kind in in_floats):
        per = {"q4_0": 2, "q8_0": 1, "q4_k": 2, "q6_k": 2}.get(kind, 4) * (2 if driver == "anv" else 1)
        return Theirs(f"mul_mat_vec_{kind}_f32_f32_subgroup_no_shmem", (lanes, per, rows), lanes)
    per = 2 if kind == "mxfp4" else 1
    if driver == "anv":
        lanes, per = {"DG2": 8, "TGL": 8}.get(gpu, 16), per * (1 if kind in ("q4_k", "q6_k") else 2)
    if gpu == "NAVI31" and rows >= 5:
        per = 4
    return Theirs(f"mul_mat_vec_{kind}_q8_1_f32_subgroup_no_shmem", (lanes, per, rows), lanes)


def prefill(gpu: str, kind: str) -> Theirs:
    """The tile it takes for large matrices: 128 x 128 on matrix units, 64 x 64 with AMD's dot products."""
    k_quant = kind in ("q4_k", "q6_k", "iq4_xs")
    if gpu == "NAVI31":
        if kind == "f16":
            return Theirs("matmul_f16_cm1", (256, 128, 128, 16, 64, 64, 2, 16, 16, 16, 64, 1), 64)
        tile = (256, 64, 128) if k_quant else (512, 128, 128)
        return Theirs(f"matmul_{kind}_q8_1_cm1", (*tile, 32, 32, 32, 2, 16, 16, 16, 32, 4), 32)
    if gpu == "BMG":
        if kind == "f16":
            return Theirs("matmul_f16_cm1", (512, 128, 128, 16, 16, 32, 2, 8, 16, 16, 16, 1), 16)
        consts = (512, 128, 256, 32, 32, 32, 2, 8, 16, 16, 16, 1, GGML_TYPES[kind])
        return Theirs("matmul_quant_f16_cm1", consts, 16)
    if compilers.GPUS[gpu].driver == "nvk":
        if kind == "f16":
            return Theirs("matmul_f16_cm1", (128, 128, 128, 16, 64, 64, 2, 16, 16, 16, 32, 1), 32)
        consts = (128, 128, 128, 32, 64, 64, 2, 16, 16, 16, 32, 1, GGML_TYPES[kind])
        return Theirs("matmul_quant_f16_cm1", consts, 32)
    if compilers.GPUS[gpu].driver == "radv":
        if kind == "f16":
            return Theirs("matmul_f16", (128, 64, 64, 16, 32, 32, 2, 4, 2, 1, 32, 1), 32)
        iterations = 1 if k_quant else 2
        return Theirs(f"matmul_{kind}_q8_1", (128, 64, 64, 32, 32, 32, iterations, 2, 2, 1, 32), 32)
    if kind == "f16":
        return Theirs("matmul_f16", (128, 128, 128, 16, 32, 64, 2, 4, 4, 1, 16, 1), 16)
    return Theirs(f"matmul_{kind}_q8_1", (128, 128, 128, 32, 32, 64, 1 if k_quant else 2, 4, 4, 1, 16), 16)


def ours(work: str, kind: str) -> list[str]:
    """The cases of bench-ops that may serve the same, the best first."""
    if work == "prefill":
        if kind == "f16":
            return [
                f"MatMulCoop.*'{kind}', n=3072, k=1024, rows=512,",
                f"MatTile.*'{kind}', n=3072, k=1024, rows=512,",
            ]
        dots = f"MatMulDot.*'{kind}', n=3072, k=1024, rows=128,"
        return [f"MatMulCoop.*'{kind}', n=3072, k=1024, rows=512,", dots]
    rows = work.split()[1]
    op = "MatWave" if kind == "f16" else "MatDot"
    return [rf"{op}\(.*'{kind}', n=3072, k=1024, rows={rows},"]


WORKS = ("decode 1", "decode 8", "prefill")

# ---- building llama.cpp's shaders ----


def glslc() -> list[str]:
    """The compiler of GLSL that llama.cpp's generator wants, in a version that knows matrix units."""
    own = compilers.FOLDER / "nvk"
    if (own / "glslc").exists():
        return [str(own / "ld.so"), "--library-path", str(own), str(own / "glslc")]
    if found := shutil.which("glslc"):
        return [found]
    raise UnsupportedFeature(
        "no glslc here: run `bash tools/setup.sh --compilers`, or install Debian's package glslc"
    )


def built(sdist: Path | None, wanted: set[str]) -> Path:
    """The folder with the modules of these names, built where they are missing."""
    CACHE.mkdir(parents=True, exist_ok=True)
    modules = CACHE / "spirv"
    if all((modules / f"{name}.spv").exists() for name in wanted):
        return modules
    source = unpacked(sdist)
    command = CACHE / "glslc"  # compiles what is wanted, of the generator's thousand variants
    names = "|".join(sorted(wanted))
    command.write_text(
        '#!/bin/sh\nfor a in "$@"; do [ "$before" = -o ] && out=$a; before=$a; done\nname=${out##*/}\n'
        f'case ${{name%.spv}} in {names}) exec {" ".join(glslc())} "$@" ;; *) : >"$out" ;; esac\n'
    )
    command.chmod(0o755)
    generator = CACHE / f"generator-{VERSION}"
    if not generator.exists():
        flags = ["-DGGML_VULKAN_COOPMAT_GLSLC_SUPPORT", "-DGGML_VULKAN_INTEGER_DOT_GLSLC_SUPPORT", "-O0"]
        own = [str(source / "vulkan-shaders-gen.cpp"), "-o", f"{generator}.new", "-lpthread"]
        run([os.environ.get("CXX", "c++"), *flags, *own])
        Path(f"{generator}.new").replace(generator)
    modules.mkdir(exist_ok=True)
    for name in SOURCES:
        run(
            [
                str(generator),
                "--glslc",
                str(command),
                "--source",
                str(source / f"{name}.comp"),
                "--output-dir",
                str(modules),
                "--target-hpp",
                str(CACHE / "h"),
                "--target-cpp",
                str(CACHE / "c"),
            ]
        )
    for empty in [path for path in modules.glob("*.spv") if not path.stat().st_size]:
        empty.unlink()
    if lacking := sorted(name for name in wanted if not (modules / f"{name}.spv").exists()):
        raise VkbackendError(
            f"llama.cpp's generator made no {', '.join(lacking)}; is the package another version?"
        )
    return modules


def unpacked(sdist: Path | None) -> Path:
    folder = CACHE / f"llama_cpp_python-{VERSION}" / SHADERS
    if not folder.exists():
        if sdist is None:
            run(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--no-deps",
                    "--no-binary",
                    ":all:",
                    "--dest",
                    str(CACHE),
                    f"llama-cpp-python=={VERSION}",
                ]
            )
            sdist = CACHE / f"llama_cpp_python-{VERSION}.tar.gz"
        with tarfile.open(sdist) as archive:
            inside = [m for m in archive.getmembers() if f"/{SHADERS}/" in m.name]
            archive.extractall(CACHE, members=inside, filter="data")
    return folder


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise VkbackendError(f"{Path(command[0]).name} ended with {done.returncode}: {' '.join(told)}")


# ---- the table ----

COLUMNS = (
    "GPU",
    "work",
    "weights",
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


def chosen(gpu: str, work: str, kind: str) -> Theirs:
    return prefill(gpu, kind) if work == "prefill" else decode(gpu, kind, int(work.split()[1]))


def compare(gpu: str, kinds: Sequence[str], works: Sequence[str], modules: Path) -> list[tuple[str, ...]]:
    """The rows of the table: ours beside theirs."""
    pairs = {(work, kind): chosen(gpu, work, kind) for kind in kinds for work in works}
    arguments = [a for theirs in pairs.values() for a in ("--spirv", theirs.argument(modules))]
    made = dict(zip(pairs, rows_of(gpu, arguments), strict=True))
    mine = rows_of(gpu, ["-c", "|".join(pattern for key in pairs for pattern in ours(*key))])
    found: list[tuple[str, ...]] = []
    for (work, kind), other in made.items():
        if row := best(mine, work, kind):
            cycles = "-"
            if work == "prefill":
                cycles = ratio(cycles_per_mac(row), cycles_per_mac(other))
            both = (row.kernel.split()[0], *shown(row), other.kernel, *shown(other))
            found.append((gpu, work, kind, *both, ratio(row.vector_per_32, other.vector_per_32), cycles))
    return found


def best(rows: Sequence[KernelRow], work: str, kind: str) -> KernelRow | None:
    """Ours for that work: the largest tile of the op that comes first."""
    ops = ("mat_mul_coop", "mat_mul_dot", "mat_tile") if work == "prefill" else ("mat_dot", "mat_wave")
    n = f" N={work.split()[1]} " if work != "prefill" else ""
    for op in ops:
        named = [row for row in rows if row.kernel.split()[0].split("-")[0] == f"{op}.{kind}"]
        if fits := [row for row in named if n in f"{row.kernel} "]:
            return max(fits, key=lambda row: row.macs or 0.0)
    return None


def shown(row: KernelRow) -> tuple[str, ...]:
    values = (row.vector_per_32, row.in_flight, row.registers, row.waves, row.spills)
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
        help="formats of weights (default: %(default)s)",
    )
    add("-w", "--work", default=",".join(WORKS), metavar="NAMES", help="default: %(default)s")
    add("--sdist", type=Path, metavar="FILE", help="the source package, instead of a download")
    add("--spirv", type=Path, metavar="DIR", help="llama.cpp's modules, instead of building them")
    args = parser.parse_args(argv)
    with errors_told():
        gpus, kinds, works = args.gpus.upper().split(","), args.types.split(","), args.work.split(",")
        for gpu in gpus:
            compilers.gpu_of(gpu)
        names = {chosen(gpu, work, kind).name for gpu in gpus for work in works for kind in kinds}
        modules = args.spirv or built(args.sdist, names)
        made = (compare(gpu, kinds, works, modules) for gpu in gpus)
        table("", COLUMNS, [row for rows in made for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
