"""Provides the SPIR-V module of every op and variant in `shaders/variants.toml`.

A module comes from `shaders/spv/`, the user's cache, or the compiler. The index of `shaders/spv/` contains
hashes, so changed sources and damaged modules are compiled again. Drivers do not check modules, and a
truncated module crashes some drivers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from vkbackend import cache_folder, env
from vkbackend.errors import UnsupportedFeature
from vkbackend.paths import quoted, why
from vkbackend.system import files

COMPILER = "glslangValidator"
PRIVATE = ".glslang"  # The folder in which tools/setup.sh installs a newer glslang and its libc.
_NEW = 13  # The first glslang version with GL_KHR_cooperative_matrix.
_NEEDS_NEW = "API_KHR"  # The define of variants that use GL_KHR_cooperative_matrix.
TARGET = "vulkan1.1"
_SPIRV_MAGIC, _HEADER_WORDS = b"\x03\x02\x23\x07", 5
_FUNCTION, _FUNCTION_END, _FUNCTION_CALL = 54, 56, 57  # opcodes
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


def shaders_dir() -> Path:
    installed = Path(__file__).parent / "shaders"
    return installed if (installed / "variants.toml").exists() else Path(__file__).parent.parent / "shaders"


@cache
def manifest() -> dict[str, dict[str, dict[str, str]]]:
    """Return {op: {variant: {axis: value}}} in the order of variants.toml."""
    tables: dict[str, Any] = _variants_toml()
    ops = {op: axes for op, axes in tables.items() if isinstance(axes, dict)}
    return {
        op: {
            "-".join(values) or "f32": dict(zip(axes, values, strict=True))
            for values in itertools.product(*(tables[v] if isinstance(v, str) else v for v in axes.values()))
        }
        for op, axes in ops.items()
    }


def types_of(op: str) -> frozenset[str]:
    return frozenset(axes["TYPE"] for axes in manifest()[op].values() if "TYPE" in axes)


def weight_types() -> tuple[str, ...]:
    """Return the weight formats that `embed` and all matrix ops without `dot` in their name support."""
    return tuple(_variants_toml()["weights"])


@cache
def _variants_toml() -> dict[str, Any]:
    with open(shaders_dir() / "variants.toml", "rb") as file:
        return tomllib.load(file)


def variants() -> list[tuple[str, str]]:
    return [(op, variant) for op, by_name in manifest().items() for variant in by_name]


def defines(op: str, variant: str) -> list[str]:
    """Return a variant's preprocessor defines. TYPE = q8_0 becomes TYPE_Q8_0."""
    return [f"{axis}_{value.upper()}" for axis, value in manifest()[op][variant].items()]


def sources(op: str) -> list[Path]:
    """Return the op's `.comp` file and all files that it includes, also indirectly."""
    root = shaders_dir()
    paths = [root / f"{op}.comp"]
    for path in paths:  # the loop also visits files that it appends
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            if (include := root / name) not in paths:
                paths.append(include)
    return paths


@cache
def source_key(op: str, variant: str) -> str:
    digest = hashlib.sha256(json.dumps([op, defines(op, variant), TARGET]).encode())
    for path in sources(op):
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class Compiler(NamedTuple):
    command: tuple[str, ...]
    version: str

    @property
    def is_new(self) -> bool:
        match = re.search(r"Glslang Version: (?:\d+:)?(\d+)", self.version)
        return match is not None and int(match[1]) >= _NEW


def private_tool(name: str) -> tuple[str, ...] | None:
    """Return the command that runs a tool with the loader and libc in PRIVATE, or None if the tool is
    missing."""
    prefix = shaders_dir().parent / PRIVATE
    loaders = sorted((prefix / "lib").glob("ld-linux*"))
    if not loaders or not (prefix / name).exists():
        return None
    return str(loaders[0]), "--library-path", str(prefix / "lib"), str(prefix / name)


@cache
def compilers() -> tuple[Compiler, ...]:
    commands: list[tuple[str, ...]] = []
    if binary := shutil.which(COMPILER):
        commands.append((binary,))
    if private := private_tool("glslang"):
        commands.append(private)
    ask = [
        subprocess.run([*c, "--version"], capture_output=True, text=True, encoding="utf-8", check=False)
        for c in commands
    ]
    both = zip(commands, ask, strict=True)
    return tuple(Compiler(command, done.stdout) for command, done in both if not done.returncode)


def compiler_of(op: str, variant: str) -> Compiler | None:
    new = _NEEDS_NEW in defines(op, variant)
    return next((compiler for compiler in compilers() if compiler.is_new or not new), None)


def is_available(op: str, variant: str) -> bool:
    return _is_shipped(op, variant) or compiler_of(op, variant) is not None


def compile_variant(op: str, variant: str) -> bytes:
    """Compile a variant to SPIR-V. Raises UnsupportedFeature with the compiler's messages."""
    root = shaders_dir()
    if (compiler := compiler_of(op, variant)) is None:
        lacks, advice = COMPILER, "install it (Debian/Ubuntu: apt install glslang-tools)"
        if compilers():
            lacks, advice = f"{COMPILER} of version {_NEW} or newer", "run tools/setup.sh, which unpacks one"
        raise UnsupportedFeature(
            f"shader {op}.{variant} has no SPIR-V that matches its source, and {lacks} is missing: {advice}, "
            "or a wheel, which needs no compiler"
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.spv"
            command = [*compiler.command, "-V", "--target-env", TARGET, f"-I{root}"]
            command += [f"-D{name}=1" for name in defines(op, variant)]
            command += ["-o", str(out), str(root / f"{op}.comp")]
            done = subprocess.run(
                command, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False
            )
            code = out.read_bytes() if out.exists() else b""
    except subprocess.TimeoutExpired:
        raise UnsupportedFeature(f"{COMPILER} did not finish {op}.{variant} within 120 s") from None
    except OSError as error:
        raise UnsupportedFeature(
            f"{COMPILER} cannot compile {op}.{variant}: {error}; it needs a temporary folder (TMPDIR)"
        ) from None
    if done.returncode:
        raise UnsupportedFeature(f"{COMPILER} refused {op}.{variant}:\n{done.stdout}{done.stderr}")
    if not is_complete(code):  # glslang exits with 0 even if the disk is full
        raise UnsupportedFeature(
            f"{COMPILER} wrote {len(code)} bytes of {op}.{variant}, which is not all; free space in "
            f"{tempfile.gettempdir()}, or name another folder (TMPDIR)"
        )
    return code


def is_complete(code: bytes) -> bool:
    """Return whether the instructions' lengths add up to the module's length, the last instruction ends a
    function, and every called function is defined."""
    if len(code) % 4 or not code.startswith(_SPIRV_MAGIC):
        return False
    words, at, opcode = memoryview(code).cast("I"), _HEADER_WORDS, 0
    there: set[int] = set()
    called: set[int] = set()
    while at < len(words):
        length, opcode = divmod(words[at], 1 << 16)
        if not length or at + length > len(words):
            return False
        if opcode == _FUNCTION:
            there.update(words[at : at + length][2:3])
        elif opcode == _FUNCTION_CALL:
            called.update(words[at : at + length][3:4])
        at += length
    return opcode == _FUNCTION_END and called <= there


_making: dict[tuple[str, str], Lock] = {}


def spirv(op: str, variant: str) -> bytes:
    """Return the SPIR-V module of a variant. Raises UnsupportedFeature."""
    # if several threads need a module, one thread compiles it
    with _making.setdefault((op, variant), Lock()):
        return _spirv(op, variant)


@cache
def _spirv(op: str, variant: str) -> bytes:
    assert variant in manifest().get(op, {}), f"variants.toml has no {op}.{variant}"
    if code := _shipped(op, variant):
        return code
    compiler = compiler_of(op, variant)
    made_from = _hash(source_key(op, variant).encode(), (compiler.version if compiler else "").encode())
    name = f"{op}.{variant}.{made_from[:32]}.spv"
    if compiler is not None and (code := cache_folder.read(name)):
        return code
    code = compile_variant(op, variant)
    cache_folder.write(name, code)
    return code


def build(folder: Path) -> int:
    """Write the SPIR-V of all variants and an index to `folder`, and return the number of modules. Variants
    that need a newer compiler are skipped."""
    able = [(op, variant) for op, variant in variants() if compiler_of(op, variant) or not compilers()]
    index: dict[str, list[str]] = {}
    # threads suffice, because each waits for a compiler process
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (op, variant), code in zip(able, pool.map(lambda pair: spirv(*pair), able), strict=True):
            write_atomic(folder / f"{op}.{variant}.spv", code)
            index[f"{op}.{variant}"] = [source_key(op, variant), _hash(code)]
    for stale in folder.glob("*.spv"):
        if stale.stem not in index:
            stale.unlink()
    write_atomic(folder / "index.json", json.dumps(index, indent=1).encode())
    return len(index)


def write_atomic(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)  # mkstemp sets mode 0600, which a wheel would preserve
        files.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _spv_dir() -> Path:
    return shaders_dir() / "spv"


def _is_shipped(op: str, variant: str) -> bool:
    return _shipped_index().get(f"{op}.{variant}", [""])[0] == source_key(op, variant)


def _shipped(op: str, variant: str) -> bytes | None:
    """Return the packaged module, or None if it is missing, outdated or damaged."""
    if not _is_shipped(op, variant):
        return None
    path = _spv_dir() / f"{op}.{variant}.spv"
    try:
        code = path.read_bytes()
    except OSError as error:
        env.log(0, f"{quoted(path)} is not used: {why(error)}; install the package again")
        return None
    if _hash(code) != _shipped_index()[f"{op}.{variant}"][1]:
        env.log(0, f"{quoted(path)} is not used: it is damaged; install the package again")
        return None
    return code


@cache
def _shipped_index() -> dict[str, list[str]]:
    path = _spv_dir() / "index.json"
    try:
        index = json.loads(path.read_bytes())
        return {str(name): [str(source), str(module)] for name, (source, module) in dict(index).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        env.log(0, f"{quoted(path)} is not used: {type(error).__name__}; build or install the package again")
        return {}


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
