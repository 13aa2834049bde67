"""SPIR-V of every (op, variant) in the manifest `shaders/variants.toml`.

Looked up in this order: shipped in `shaders/spv/` (index keyed by a hash of the sources), the user's cache,
the compiler. So a changed source or include recompiles by itself, and an installed wheel needs no compiler.
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
from functools import cache
from pathlib import Path
from typing import Any

from vkbackend import env
from vkbackend.errors import UnsupportedFeature

COMPILER = "glslangValidator"
TARGET = "vulkan1.1"
_SPIRV_MAGIC = b"\x03\x02\x23\x07"
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


def shaders_dir() -> Path:
    """Folder of the GLSL sources: inside the package when installed, beside it in a checkout."""
    installed = Path(__file__).parent / "shaders"
    return installed if (installed / "variants.toml").exists() else Path(__file__).parent.parent / "shaders"


@cache
def manifest() -> dict[str, dict[str, dict[str, str]]]:
    """op -> variant -> {axis: value}, in the manifest's order."""
    tables: dict[str, Any] = _variants_toml()
    ops = {op: axes for op, axes in tables.items() if isinstance(axes, dict)}
    return {
        op: {
            "-".join(values) or "f32": dict(zip(axes, values, strict=True))
            for values in itertools.product(*(tables[v] if isinstance(v, str) else v for v in axes.values()))
        }
        for op, axes in ops.items()
    }


def weight_types() -> tuple[str, ...]:
    """The formats of weights that every matrix op and embed have a variant for."""
    return tuple(_variants_toml()["weights"])


@cache
def _variants_toml() -> dict[str, Any]:
    with open(shaders_dir() / "variants.toml", "rb") as file:
        return tomllib.load(file)


def variants() -> list[tuple[str, str]]:
    """Every (op, variant)."""
    return [(op, variant) for op, by_name in manifest().items() for variant in by_name]


def defines(op: str, variant: str) -> list[str]:
    """Preprocessor names set for a variant: TYPE = q8_0 gives TYPE_Q8_0."""
    return [f"{axis}_{value.upper()}" for axis, value in manifest()[op][variant].items()]


def sources(op: str) -> list[Path]:
    """The op's `.comp` and everything it includes, directly or not, each once."""
    root = shaders_dir()
    found = [root / f"{op}.comp"]
    for path in found:  # grows while it is walked
        for name in _INCLUDE.findall(path.read_text()):
            if (include := root / name) not in found:
                found.append(include)
    return found


@cache
def source_key(op: str, variant: str) -> str:
    """Hash over all sources, the defines and the target environment."""
    digest = hashlib.sha256(json.dumps([op, defines(op, variant), TARGET]).encode())
    for path in sources(op):
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def compiler_version() -> str | None:
    """What the compiler prints about itself, or None where there is no compiler."""
    if not (binary := shutil.which(COMPILER)):
        return None
    return subprocess.run([binary, "--version"], capture_output=True, text=True, check=False).stdout


def compile_variant(op: str, variant: str) -> bytes:
    """Run the compiler; raises UnsupportedFeature with its output if it is missing or refuses the source."""
    root = shaders_dir()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.spv"
        command = [COMPILER, "-V", "--target-env", TARGET, f"-I{root}"]
        command += [f"-D{name}=1" for name in defines(op, variant)]
        command += ["-o", str(out), str(root / f"{op}.comp")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        except FileNotFoundError:
            raise UnsupportedFeature(
                f"shader {op}.{variant} has no compiled form that fits its source and no {COMPILER} is here:"
                " install it (Debian/Ubuntu: apt install glslang-tools), or a wheel, which needs none"
            ) from None
        except subprocess.TimeoutExpired:
            raise UnsupportedFeature(f"{COMPILER} did not finish {op}.{variant} within 120 s") from None
        if done.returncode or not out.exists():
            raise UnsupportedFeature(f"{COMPILER} refused {op}.{variant}:\n{done.stdout}{done.stderr}")
        return out.read_bytes()


@cache
def spirv(op: str, variant: str) -> bytes:
    """The SPIR-V module of a variant; raises UnsupportedFeature if it can neither be found nor compiled."""
    assert variant in manifest().get(op, {}), f"variants.toml has no {op}.{variant}"
    key = source_key(op, variant)
    if _shipped_index().get(f"{op}.{variant}") == key:
        return (_spv_dir() / f"{op}.{variant}.spv").read_bytes()
    version = compiler_version()
    cached = env.cache_dir() / "spirv" / f"{op}.{variant}.{_hash(key, version or '')[:32]}.spv"
    if version is not None and (code := _read_spirv(cached)):
        return code
    code = compile_variant(op, variant)
    try:
        write_atomic(cached, code)
    except OSError:
        pass  # a read-only home costs a recompile, nothing else
    return code


def build(folder: Path) -> int:
    """Write the SPIR-V of the whole manifest and its index into `folder`; returns the number of modules."""
    index = {f"{op}.{variant}": source_key(op, variant) for op, variant in variants()}
    for op, variant in variants():
        write_atomic(folder / f"{op}.{variant}.spv", spirv(op, variant))
    for stale in folder.glob("*.spv"):
        if stale.stem not in index:
            stale.unlink()
    write_atomic(folder / "index.json", json.dumps(index, indent=1).encode())
    return len(index)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` in one step, so that another process reads either the old bytes or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)  # mkstemp makes 0600, and a wheel keeps the mode
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _spv_dir() -> Path:
    return shaders_dir() / "spv"


@cache
def _shipped_index() -> dict[str, str]:
    try:
        return dict(json.loads((_spv_dir() / "index.json").read_text()))
    except FileNotFoundError:
        return {}


def _read_spirv(path: Path) -> bytes | None:
    """The file's bytes if they look like SPIR-V (a damaged cache entry is compiled again)."""
    try:
        code = path.read_bytes()
    except OSError:
        return None
    return code if code.startswith(_SPIRV_MAGIC) and len(code) % 4 == 0 else None


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
