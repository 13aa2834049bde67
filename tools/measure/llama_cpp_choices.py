"""Returns the kernels that llama.cpp runs on a GPU, and their constants. The rules are from llama.cpp's host
code (ggml-vulkan.cpp in llama-cpp-python 0.3.36).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vkbackend.tools.measure import compilers

GGML_TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8, "q4_k": 12, "q6_k": 14, "iq4_xs": 23, "mxfp4": 39}
TYPES = ("q4_0", "q4_k", "q8_0", "q6_k", "iq4_xs", "mxfp4", "f16")
BLOCK_NBYTES = {"f16": 2, "q8_0": 34, "q4_0": 18}
HEAD = 128


@dataclass(frozen=True)
class Theirs:
    """A shader of llama.cpp: its module, specialization constants (of ids 0, 1, ...), and subgroup size."""

    name: str
    consts: tuple[int, ...]
    lanes: int
    more: tuple[tuple[int, int], ...] = ()  # further constants: (id, value)

    def argument(self, folder: Path) -> str:
        pairs = [*enumerate(self.consts), *self.more]
        return f"{folder / self.name}.spv:{','.join(f'{a}={b}' for a, b in pairs)}:{self.lanes}"


# Subgroup sizes of products with few rows. On Intel, these are the sizes for float x.
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
    """Return mul_mat_vec. x has 8 bits if ggml_vk_should_use_mmvq is true for k = 4,096, and is float
    otherwise."""
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
    """Return the kernel for large matrices. Tiles are 128 x 128 on matrix units, and 64 x 64 with AMD's dot
    products."""
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


def attention(gpu: str, kind: str, rows: int) -> Theirs:
    """Return flash attention with heads of size 128 and 4 q heads per KV head. For one row, the four heads
    become rows of a tile. For a prompt, quantized caches are first converted to F16. Matrix units are 16 x 16
    x 16 except on Turing. Scores and sums are f32, llama.cpp's default."""
    driver, prompt = compilers.GPUS[gpu].driver, rows > 8
    kind = "f16" if prompt and not (driver == "anv" and gpu != "BMG") else kind
    mask = 3 if prompt else 2
    cache = (GGML_TYPES[kind], GGML_TYPES[kind], BLOCK_NBYTES[kind], BLOCK_NBYTES[kind])
    staged = int(driver == "nvk")
    lanes = {"radv": 64, "anv": 32, "nvk": 32}[driver]
    if gpu in ("NAVI31", "GFX1201", "AMPERE"):
        consts = (4 * lanes, 16, 64, HEAD, HEAD, 0, 8, 4, lanes, staged, mask, 0, *cache)
        return Theirs("flash_attn_f32_f16_cm1", consts, lanes)
    split = 1 if prompt and driver == "radv" else 4
    block = 4 if not prompt else 8 if split == 1 or driver == "anv" else 16
    # The kernel allocates this much shared memory only to limit the number of workgroups.
    idle = 30 * 64 if prompt and driver == "radv" else 0
    subgroup = 0 if driver == "anv" else lanes  # 0: any subgroup size
    consts = (4 * lanes, block, 32, HEAD, HEAD, 0, 8, split, subgroup, staged, mask, idle, *cache)
    name = "flash_attn_f32_f16" + ("_int8" if kind in ("q8_0", "q4_0") else "")
    return Theirs(name, consts, 16 if driver == "anv" else lanes)
