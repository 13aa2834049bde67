"""Runs this checkout's Python with the compiler of an absent GPU as the only Vulkan driver. The compilers
report statistics, but cannot execute. `tools/setup.sh --compilers` unpacks the compilers. It also unpacks a
newer lavapipe with matrix units (8 x 8), which can execute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkbackend.errors import UnsupportedFeature, VkbackendError

FOLDER = Path(__file__).resolve().parents[2] / ".drivers"
ARM = FOLDER.with_name(".aarch64")  # A tree for ARM, whose programs run under QEMU.
MATRIX_UNITS = "matrix_units"
_UNPACK = "run `bash tools/setup.sh"


@dataclass(frozen=True)
class Gpu:
    name: str
    driver: str  # Folder in .drivers.
    variable: str = ""  # Environment variable by which the driver or its shim selects the GPU.
    value: str = ""
    manifest: str = ""  # Name in the tree for ARM, if the driver is there and not in .drivers.


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("NAVI21", "radv", "RADV_FORCE_FAMILY", "NAVI21"),  # RDNA2.
        Gpu("NAVI31", "radv", "RADV_FORCE_FAMILY", "NAVI31"),  # RDNA3.
        # RDNA4. Mesa 25.0 does not support RDNA4's matrix units.
        Gpu("GFX1201", "radv", "RADV_FORCE_FAMILY", "GFX1201"),
        Gpu("TGL", "anv", "INTEL_STUB_GPU_PLATFORM", "tgl"),  # Xe-LP.
        Gpu("DG2", "anv", "INTEL_STUB_GPU_PLATFORM", "dg2"),  # Arc A.
        Gpu("BMG", "anv", "INTEL_STUB_GPU_PLATFORM", "bmg"),  # Arc B.
        Gpu("TURING", "nvk", "NOUVEAU_CHIPSET", "162"),  # TU102.
        Gpu("AMPERE", "nvk", "NOUVEAU_CHIPSET", "172"),  # GA102.
    )
}
# GPUs whose compilers Debian builds only for ARM. Under QEMU they take about ten times as long.
ARM_GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A660", "turnip", "FD_GPU_ID", "660", "freedreno"),  # Adreno 6xx.
        Gpu("G610", "panvk", "PAN_GPU_ID", "a867", "panfrost"),  # Mali of the third Valhall generation.
        Gpu("V3D42", "v3dv", "V3D_VERSION", "42", "broadcom"),  # Raspberry Pi 4.
        Gpu("V3D71", "v3dv", "V3D_VERSION", "71", "broadcom"),  # Raspberry Pi 5.
        Gpu("G13G", "honeykrisp", manifest="asahi"),  # Apple M1.
        Gpu("BXS-4-64", "powervr", manifest="powervr_mesa"),  # Imagination's B-Series.
    )
}


def gpu_of(name: str) -> Gpu:
    """Raises an error if the GPU's compiler is missing."""
    gpu = (GPUS | ARM_GPUS).get(name.upper())
    if gpu is None:
        raise VkbackendError(
            f"no compiler here is known for {name!r}; there are {', '.join([*GPUS, *ARM_GPUS])}"
        )
    if why := missing(gpu):
        raise UnsupportedFeature(f"{gpu.name}: {why}")
    return gpu


def missing(gpu: Gpu) -> str:
    """Return why the GPU's compiler is missing, or ""."""
    if gpu.manifest:
        has = _manifest_of(gpu).exists() and _shim_of(gpu).exists()
        return "" if has else f"the compiler {gpu.driver} is not in {ARM.name}/: {_UNPACK} --aarch64`"
    if (FOLDER / gpu.driver / "icd.json").exists():
        return ""
    option = "--drivers" if gpu.driver == "radv" else "--compilers"
    return f"the compiler {gpu.driver} is not in {FOLDER.name}/: {_UNPACK} {option}`"


def version(gpu: Gpu) -> str:
    path = FOLDER / gpu.driver / "version"
    if gpu.manifest:
        own = ARM / "root" / f"{gpu.driver}-version"
        path = own if own.exists() else own.with_name("mesa-version")
    return path.read_text(encoding="utf-8").strip()


def _manifest_of(gpu: Gpu) -> Path:
    if gpu.manifest:
        return ARM / "root" / "usr" / "share" / "vulkan" / "icd.d" / f"{gpu.manifest}_icd.json"
    return FOLDER / gpu.driver / "icd.json"


def _shim_of(gpu: Gpu) -> Path:
    return ARM / "shims" / f"{gpu.driver}.so" if gpu.manifest else FOLDER / gpu.driver / "shim.so"


def start(gpu: Gpu, module: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of `python -m module` with the GPU's compiler as the only driver.
    Except for AMD, a shim replaces the kernel driver."""
    command, env = _with_driver(gpu.driver, module, arguments)
    if gpu.manifest:
        command = [*_arm_python(), "-m", module, *arguments]
        env |= dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), str(_manifest_of(gpu)))
    others = {other.variable for other in [*GPUS.values(), *ARM_GPUS.values()]} - {gpu.variable}
    env = {name: value for name, value in env.items() if name not in others}
    shim = _shim_of(gpu)
    preload = ["env", f"LD_PRELOAD={shim}"] if shim.exists() else []
    if gpu.variable:
        env[gpu.variable] = gpu.value
    return [*preload, *command], env | _ALLOWED


# Without these variables, the drivers refuse GPUs for which they do not pass the conformance tests.
_ALLOWED = {f"{driver}_I_WANT_A_BROKEN_VULKAN_DRIVER": "1" for driver in ("NVK", "PAN", "PVR")}


def _arm_python() -> list[str]:
    """Return the command of ARM's Python without the shell script bin/python, which cannot load a shim for
    ARM. QEMU's own program loads no libraries."""
    program = next((ARM / "root" / "usr" / "bin").glob("python3.*[0-9]"))
    qemu = [str(ARM / "qemu-aarch64"), "-L", str(ARM / "root"), "-0", str(ARM / "bin" / "python")]
    return [*qemu, str(program), "-P"]


def start_with_matrix_units(module: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of `python -m module` on the lavapipe with matrix units. Ops are
    chosen as for a GPU. Raises UnsupportedFeature if the build is missing."""
    if not (FOLDER / MATRIX_UNITS / "icd.json").exists():
        raise UnsupportedFeature(
            f"no lavapipe with matrix units is in {FOLDER.name}/: {_UNPACK} --compilers`"
        )
    command, env = _with_driver(MATRIX_UNITS, module, arguments)
    return command, env | {"VKBACKEND_AS_GPU": "1"}


def _with_driver(driver: str, module: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command, and an environment in which Vulkan loads only this driver. If the driver has its own
    libc, the libc's loader starts Python."""
    folder = FOLDER / driver
    loader = folder / "ld.so"
    launcher = (
        [str(loader), "--argv0", sys.executable, "--library-path", str(folder)] if loader.exists() else []
    )
    added = dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), str(folder / "icd.json"))
    return [*launcher, sys.executable, "-m", module, *arguments], os.environ | added


def ask(gpu: Gpu, module: str, arguments: Sequence[str]) -> Any:
    """Run `python -m module` with the GPU's compiler, and return the JSON in its last line of output."""
    command, env = start(gpu, module, arguments)
    done = subprocess.run(command, env=env, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode or not done.stdout:
        reason = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise VkbackendError(f"{gpu.name}: the compiler's process ended with {done.returncode}: {reason}")
    return json.loads(done.stdout.splitlines()[-1])
