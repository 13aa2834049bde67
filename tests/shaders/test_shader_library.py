"""Shaders compile to valid SPIR-V, which is cached and packed into the wheel. Damaged modules are refused."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from caches import compiled, fill
from places import ROOT

from vkbackend import shaderlib
from vkbackend.errors import UnsupportedFeature

pytestmark = pytest.mark.no_vulkan


needs_compiler = pytest.mark.skipif(
    not shaderlib.compilers(), reason=f"no {shaderlib.COMPILER} (apt install glslang-tools)"
)


def validated() -> list[Any]:
    """Return all pairs of an op and a variant. By default, the first variant of each op and a thirtieth of
    the other pairs are validated. So every format is validated with some op."""
    ops = list(dict.fromkeys(op for op, _ in shaderlib.variants()))
    seen = dict.fromkeys(ops, 0)
    params = []
    for op, variant in shaderlib.variants():
        seldom = seen[op] > 0 and (ops.index(op) + seen[op]) % 30 > 0
        seen[op] += 1
        params.append(pytest.param(op, variant, marks=[pytest.mark.wide] if seldom else []))
    return params


@needs_compiler
def test_every_variant_compiles() -> None:
    for op, variant in shaderlib.variants():
        if shaderlib.is_available(op, variant):
            assert shaderlib.spirv(op, variant)[4:8] <= b"\x00\x03\x01\x00", (op, variant)


@needs_compiler
@pytest.mark.parametrize(("op", "variant"), validated())
def test_modules_are_valid(op: str, variant: str, tmp_path: Path) -> None:
    if not shaderlib.is_available(op, variant):
        pytest.skip("no glslang new enough (tools/setup.sh)")
    code = shaderlib.spirv(op, variant)
    validator = shaderlib.private_tool("spirv-val") or shutil.which("spirv-val")
    if not validator:
        pytest.skip("compiled; no spirv-val to validate with (apt install spirv-tools)")
    module = tmp_path / "module.spv"
    module.write_bytes(code)
    command = (validator,) if isinstance(validator, str) else validator
    done = subprocess.run(
        [*command, "--target-env", "vulkan1.1", module], capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def compiled_before() -> list[Path]:
    """Return the modules that other tests have compiled. Request this fixture before `library`, which
    replaces the cache."""
    return compiled()


def link_private_tools(project: Path) -> None:
    if (ROOT / shaderlib.PRIVATE).exists():
        (project / shaderlib.PRIVATE).symlink_to(ROOT / shaderlib.PRIVATE)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a copy of the sources and an empty cache, without shipped modules."""
    folder = tmp_path / "shaders"
    shutil.copytree(shaderlib.shaders_dir(), folder, ignore=shutil.ignore_patterns("spv"))
    monkeypatch.setattr(shaderlib, "shaders_dir", lambda: folder)
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path / "cache"))
    forget()
    yield folder
    forget()


def forget() -> None:
    for name in ("_variants_toml", "manifest", "source_key", "_spirv", "compilers", "_shipped_index"):
        getattr(shaderlib, name).cache_clear()


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    compile_variant = shaderlib.compile_variant

    def counted(op: str, variant: str) -> bytes:
        seen.append(f"{op}.{variant}")
        return compile_variant(op, variant)

    monkeypatch.setattr(shaderlib, "compile_variant", counted)
    return seen


@needs_compiler
def test_threads_compile_a_variant_once(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = count_compilations(monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda _: shaderlib.spirv("add", "f32"), range(4)))
    assert compiled == ["add.f32"] and len(set(codes)) == 1


@needs_compiler
def test_cache_follows_sources_and_includes(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = count_compilations(monkeypatch)
    code = shaderlib.spirv("add", "f32")
    forget()
    assert shaderlib.spirv("add", "f32") == code and compiled == ["add.f32"]
    for name in ("lib/types.glsl", "add.comp"):
        path = library / name
        path.write_text(
            path.read_text(encoding="utf-8").replace("return", "return ") + "\n", encoding="utf-8"
        )
        forget()
        shaderlib.spirv("add", "f32")
    assert compiled == ["add.f32"] * 3


@needs_compiler
def test_damaged_cache_entry_is_compiled_again(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = shaderlib.spirv("add", "f32")
    (entry,) = compiled()
    complete = entry.read_bytes()
    for damaged in (
        b"\0" * 64,
        complete[:-4],
        complete[: len(complete) // 8 * 4],
        code,
        code[: len(code) // 8 * 4],
    ):
        entry.write_bytes(damaged)
        forget()
        assert shaderlib.spirv("add", "f32") == code and entry.read_bytes() == complete


@needs_compiler
def test_compiler_errors_surface(library: Path) -> None:
    (library / "add.comp").write_text("#version 450\nvoid main() { undeclared = 1; }\n", encoding="utf-8")
    with pytest.raises(UnsupportedFeature, match=r"(?s)add\.f32.*undeclared"):
        shaderlib.spirv("add", "f32")


@needs_compiler
@pytest.mark.parametrize(
    ("weights", "op", "lacks"),
    [("weights", "mat_vec", "no block description and no decode4"), ("dot_weights", "mat_dot", "no quants")],
)
def test_unknown_format_is_reported(library: Path, weights: str, op: str, lacks: str) -> None:
    new = "q9_9" if weights == "weights" else "iq3_s"
    path = library / "variants.toml"
    path.write_text(
        path.read_text(encoding="utf-8").replace(f"\n{weights} = [", f'\n{weights} = [ "{new}",'),
        encoding="utf-8",
    )
    forget()
    with pytest.raises(UnsupportedFeature, match=rf"(?s)refused {op}\.{new}.*unknown TYPE has {lacks}"):
        shaderlib.spirv(op, new)


def test_without_compiler(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnsupportedFeature, match="glslang-tools"):
        shaderlib.spirv("add", "f32")


@needs_compiler
def test_shipped_modules_need_no_compiler(
    compiled_before: list[Path], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Use existing modules, because compiling all variants would take a minute.
    fill(library.parent / "cache", compiled_before)
    link_private_tools(library.parent)
    forget()
    able = [pair for pair in shaderlib.variants() if shaderlib.is_available(*pair)]
    assert shaderlib.build(library / "spv") == len(able)
    (library / "spv" / "gone.f32.spv").write_bytes(b"")
    shaderlib.build(library / "spv")
    assert not (library / "spv" / "gone.f32.spv").exists()
    forget()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("VKBACKEND_CACHE", "off")
    for op, variant in able:
        assert shaderlib.is_complete(shaderlib.spirv(op, variant))


@needs_compiler
@pytest.mark.parametrize("damage", ["module", "missing", "index"])
def test_damaged_package_is_reported(
    library: Path, damage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged module is compiled again, or refused if no compiler is installed."""
    monkeypatch.setattr(shaderlib, "variants", lambda: [("add", "f32")])
    assert shaderlib.build(library / "spv") == 1
    code, module = shaderlib.spirv("add", "f32"), library / "spv" / "add.f32.spv"
    if damage == "index":
        (library / "spv" / "index.json").write_text("[" * 100_000, encoding="utf-8")
    elif damage == "missing":
        module.unlink()
    else:
        module.write_bytes(code[: len(code) // 8 * 4])
    forget()
    assert shaderlib.spirv("add", "f32") == code
    (line,) = capsys.readouterr().err.splitlines()
    assert str(library / "spv") in line and "install the package again" in line
    monkeypatch.setenv("PATH", "")
    forget()
    with pytest.raises(UnsupportedFeature, match="glslang-tools"):
        shaderlib.spirv("add", "f32")


@needs_compiler
def test_incomplete_modules_are_recognised(library: Path) -> None:
    code = shaderlib.spirv("add", "f32")
    assert shaderlib.is_complete(code)
    assert not any(shaderlib.is_complete(code[:n]) for n in range(len(code)))
    assert not shaderlib.is_complete(code + b"\0\0\0\0") and not shaderlib.is_complete(bytes(len(code)))


@needs_compiler
def test_compiler_with_full_disk(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """glslang exits with 0 even if the disk is full and the module is incomplete."""
    run = subprocess.run

    def truncating_run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        done = run(command, **options)  # type: ignore[call-overload]
        if "-o" in command:
            out = Path(command[command.index("-o") + 1])
            out.write_bytes(out.read_bytes()[:400])
        return done

    monkeypatch.setattr(subprocess, "run", truncating_run)
    with pytest.raises(UnsupportedFeature, match=r"wrote 400 bytes of add\.f32, .*TMPDIR"):
        shaderlib.spirv("add", "f32")
    assert not compiled()
    monkeypatch.setattr(tempfile, "tempdir", str(library / "missing"))
    with pytest.raises(UnsupportedFeature, match="needs a temporary folder"):
        shaderlib.spirv("add", "f32")


@needs_compiler
def test_unwritable_cache_costs_only_time(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("/dev/null/cache", "off"):
        monkeypatch.setenv("VKBACKEND_CACHE", place)
        forget()
        assert shaderlib.spirv("add", "f32")


@pytest.mark.wide
@needs_compiler
@pytest.mark.skipif(
    int(version("setuptools").partition(".")[0]) < 77,
    reason="building needs setuptools >= 77 in this environment",
)
def test_wheel_carries_spirv(tmp_path: Path) -> None:
    project = tmp_path / "project"
    skipped = shutil.ignore_patterns(".*", "build", "*.egg-info", "spv", "tests", "__pycache__")
    shutil.copytree(ROOT, project, ignore=skipped)
    link_private_tools(project)
    pip = f"{sys.executable} -m pip wheel --no-deps --no-index --no-build-isolation -w".split()
    done = subprocess.run([*pip, tmp_path, project], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    built = [pair for pair in shaderlib.variants() if shaderlib.is_available(*pair)]
    modules = {f"vkbackend/shaders/spv/{op}.{variant}.spv" for op, variant in built}
    assert modules | {"vkbackend/shaders/spv/index.json", "vkbackend/shaders/lib/step.glsl"} <= names


BUILD = {
    "vkbackend.shaderlib",
    "vkbackend.cache_folder",
    "vkbackend.trusted_files",
    "vkbackend.env",
    "vkbackend.errors",
    "vkbackend.paths",
    "vkbackend.system.files",
    "vkbackend.system.folder",
    "vkbackend.system.processors",
}


@pytest.mark.parametrize("module", sorted(BUILD))
def test_build_imports_only_the_standard_library(module: str) -> None:
    """setup.py imports shaderlib while only setuptools is installed."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    imported = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module in ("vkbackend", "vkbackend.system"):
            imported |= {f"{n.module}.{alias.name}" for alias in n.names}
        elif isinstance(n, ast.ImportFrom) and n.module:
            imported.add(n.module)
    assert all(name.partition(".")[0] in sys.stdlib_module_names or name in BUILD for name in imported)
