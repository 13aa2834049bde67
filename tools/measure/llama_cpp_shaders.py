"""Builds llama.cpp's shaders from llama-cpp-python's source package with llama.cpp's generator and glslc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from vkbackend.errors import UnsupportedFeature, VkbackendError
from vkbackend.tools.measure import compilers

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
    "flash_attn",
    "flash_attn_cm1",
)


def glslc() -> list[str]:
    folder = compilers.FOLDER / "nvk"
    if (folder / "glslc").exists():
        return [str(folder / "ld.so"), "--library-path", str(folder), str(folder / "glslc")]
    if path := shutil.which("glslc"):
        return [path]
    raise UnsupportedFeature(
        "no glslc here: run `bash tools/setup.sh --compilers`, or install Debian's package glslc"
    )


def built(sdist: Path | None, wanted: set[str]) -> Path:
    """Build the modules in `wanted` that are missing, and return the folder of all modules."""
    CACHE.mkdir(parents=True, exist_ok=True)
    modules = CACHE / "spirv"
    if all((modules / f"{name}.spv").exists() for name in wanted):
        return modules
    source = unpacked(sdist)
    command = CACHE / "glslc"  # a wrapper that skips all but the wanted variants
    names = "|".join(sorted(wanted))
    command.write_text(
        '#!/bin/sh\nfor a in "$@"; do [ "$before" = -o ] && out=$a; before=$a; done\nname=${out##*/}\n'
        f'case ${{name%.spv}} in {names}) exec {" ".join(glslc())} "$@" ;; *) : >"$out" ;; esac\n',
        encoding="utf-8",
    )
    command.chmod(0o755)
    generator = CACHE / f"generator-{VERSION}"
    if not generator.exists():
        flags = ["-DGGML_VULKAN_COOPMAT_GLSLC_SUPPORT", "-DGGML_VULKAN_INTEGER_DOT_GLSLC_SUPPORT", "-O0"]
        arguments = [str(source / "vulkan-shaders-gen.cpp"), "-o", f"{generator}.new", "-lpthread"]
        run([os.environ.get("CXX", "c++"), *flags, *arguments])
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
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise VkbackendError(f"{Path(command[0]).name} ended with {done.returncode}: {' '.join(reason)}")
