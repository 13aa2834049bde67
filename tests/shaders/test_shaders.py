"""Shader sources against op specs, manifest and the layout of StepParams; the shader library; the wheel."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from caches import compiled, fill
from places import ROOT

from vkbackend import ops, shaderlib, step, twins
from vkbackend.errors import UnsupportedFeature
from vkbackend.limits import Limits, MatrixUnits
from vkbackend.tools.op_cases import cases as op_cases
from vkbackend.tools.op_cases import setup as op_setup

pytestmark = pytest.mark.no_vulkan


needs_compiler = pytest.mark.skipif(
    not shaderlib.compilers(), reason=f"no {shaderlib.COMPILER} (apt install glslang-tools)"
)


def source(op: str) -> str:
    """The op's source with its includes in place and comments removed."""

    def text(name: str) -> str:
        code = re.sub(r"//[^\n]*", "", (shaderlib.shaders_dir() / name).read_text())
        return re.sub(r'#include "([^"]+)"', lambda m: text(m[1]), code)

    return text(f"{op}.comp")


# ---- one op, one word, its places ----


def has_twin(op: str) -> bool:
    try:
        return callable(twins.twin_of(op))
    except NotImplementedError:
        return False


def places() -> dict[str, set[str]]:
    """The ops that each place has."""
    cases = {re.sub(r"(?<!^)(?=[A-Z])", "_", type(case).__name__).lower() for case in op_cases.CASES}
    products = ops.MATRIX_OPS.keys() | ops.EXPERTS_OPS.keys()
    return {
        "shaders/OP.comp": {path.stem for path in shaderlib.shaders_dir().glob("*.comp")},
        "a table in shaders/variants.toml": set(shaderlib.manifest()),
        "an entry in ops/table.py or ops/spec.py": set(ops.OPS),
        "a method of ops.Recorder": products | {op for op in ops.OPS if hasattr(ops.Recorder, op)},
        "a twin in twins/": {op for op in ops.OPS if has_twin(op)},
        "a case in tools/op_cases/": cases,
    }


def missing_places(places: dict[str, set[str]]) -> list[str]:
    every = sorted(set().union(*places.values()))
    return [f"{op} lacks {place}" for op in every for place, found in places.items() if op not in found]


def test_every_op_has_its_places() -> None:
    assert not missing_places(places())


@pytest.mark.parametrize("place", places())
def test_a_missing_place_is_named(place: str) -> None:
    without = {name: found - {"rope"} if name == place else found for name, found in places().items()}
    assert missing_places(without) == [f"rope lacks {place}"]


@pytest.mark.parametrize("op", ops.OPS)
def test_twin_takes_the_ops_arguments(op: str) -> None:
    spec = ops.OPS[op]
    parameters = list(inspect.signature(twins.twin_of(op)).parameters.values())
    storage = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert storage == [*spec.arg_names, *(["step"] if spec.step else [])]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert keywords[: len(spec.push)] == [name for name, _ in spec.push]
    assert set(keywords[len(spec.push) :]) <= {"variant", *(name.lower() for name in spec.consts)}


# ---- sources against specs ----


@pytest.mark.parametrize("op", ops.OPS)
def test_bindings(op: str) -> None:
    code, spec = source(op), ops.OPS[op]
    if spec.addressed:
        assert "binding = 0) readonly buffer" not in code.replace(
            "set = 1, binding = 0) readonly buffer Code", ""
        )
        return
    found = re.findall(
        r"layout\(set = 0, binding = (\d+)\) (?:(readonly|writeonly) )?buffer \w+ \{ \w+ (\w+)\[\]; \};", code
    )
    assert [(int(i), name) for i, _, name in found] == list(enumerate(spec.arg_names))
    for i, access, name in found:
        if int(i) not in spec.written:
            assert access == "readonly", f"{op}: {name} is only read"
        else:
            uses = len(re.findall(rf"\b{name}\[", code)) - 1  # less the declaration
            writes = len(re.findall(rf"\b{name}\[[^;=]*\] = ", code))
            assert access == ("writeonly" if uses == writes else ""), (
                f"{op}: {name}, {uses} uses, {writes} writes"
            )
    binding = re.search(r"#define STEP_BINDING (\d+)", code)
    assert (binding is not None) == spec.step
    assert binding is None or int(binding[1]) == len(spec.args)


@pytest.mark.parametrize("op", ops.OPS)
def test_push_constants(op: str) -> None:
    spec = ops.OPS[op]
    block = re.search(r"layout\(push_constant\) uniform Push \{(.*?)\};", source(op), re.DOTALL)
    assert block is not None
    fields = [
        (name.strip(), kind)
        for kind, names in re.findall(r"(uint|int|float|Words|Floats|FloatsOut) ([^;]+);", block[1])
        for name in names.split(",")
    ]
    heads = [(f"{name}_off", "u") for name in spec.arg_names]
    if spec.addressed:  # what is only written is of a type that cannot be read, and the other way round
        kinds = [kind for _, kind in fields[: len(spec.args)]]
        assert [kind.endswith("Out") for kind in kinds] == [arg.endswith(":w") for arg in spec.args]
        heads = [(name, kind[0]) for name, kind in zip(spec.arg_names, kinds, strict=True)]
    assert [(name, kind[0]) for name, kind in fields] == [*heads, *spec.push]


@pytest.mark.parametrize("op", ops.OPS)
def test_specialization_constants(op: str) -> None:
    code = source(op)
    assert "layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;" in code
    found = re.findall(r"layout\(constant_id = (\d+)\) const uint (\w+)", code)
    assert [(int(i), name) for i, name in sorted(found)] == list(enumerate(ops.OPS[op].consts))


@pytest.mark.parametrize("op", ops.OPS)
def test_portable_floor(op: str) -> None:
    """No optional feature: no extension but includes and hints to the compiler, no types of 8 or 16 bits, no
    functions of an angle."""
    code = source(op)
    if ops.OPS[op].needs:
        assert "#extension" in code, f"{op} needs {ops.OPS[op].needs} and asks for nothing"
        # What a subgroup does together is whole only where none of its invocations is missing.
        assert "full_subgroups" in ops.OPS[op].needs or not re.search(r"\b(subgroup[A-Z]|gl_Subgroup)", code)
        return
    free = {"GL_GOOGLE_include_directive", "GL_EXT_control_flow_attributes"}
    assert set(re.findall(r"#extension (\w+)", code)) <= free
    assert not re.search(r"\b(u?int(8|16)_t|float16_t|subgroup\w+|sin|cos|pow)\b", code)


def test_step_layout() -> None:
    text = (shaderlib.shaders_dir() / "lib" / "step.glsl").read_text()
    sizes = {name: int(n) for name, n in re.findall(r"uvec4 (\w+)\[(\d+)\];", text)}
    assert sizes == {"runs": step.MAX_RUNS, "rows": step.MAX_ROWS, "outputs": step.MAX_ROWS // 4}
    assert 16 * (1 + sum(sizes.values())) == step.STEP_NBYTES <= 16_384
    block = re.search(r"CELL_BLOCK = (\d+)", text)
    assert block is not None and int(block[1]) == ops.CELL_BLOCK == twins.attention.CELL_BLOCK


@pytest.mark.parametrize("path", sorted(shaderlib.shaders_dir().rglob("*.[cg]*")), ids=lambda path: path.name)
def test_lanes_of_a_subgroup_take_the_same_rounds(path: Path) -> None:
    """A sum or shuffle over a subgroup behind a loop whose rounds depend on the lane may miss lanes that are
    still inside: only maximal reconvergence, which few drivers have, promises that they meet."""
    text = path.read_text()
    if re.search(r"\bsubgroup(Add|Mul|Min|Max|Shuffle|Broadcast|Inclusive|Exclusive)", text):
        loops = re.findall(r"\bfor \(([^)]*)\)", text)
        assert not [loop for loop in loops if re.search(r"\blane\b|gl_SubgroupInvocationID", loop)]


# ---- SPIR-V ----


@needs_compiler
@pytest.mark.parametrize(("op", "variant"), shaderlib.variants())
def test_compiles_and_validates(op: str, variant: str, tmp_path: Path) -> None:
    if not shaderlib.is_available(op, variant):
        pytest.skip("no glslang new enough (tools/setup.sh)")
    code = shaderlib.spirv(op, variant)
    assert code[4:8] <= b"\x00\x03\x01\x00"  # SPIR-V 1.3, what Vulkan 1.1 takes
    validator = shaderlib.private_tool("spirv-val") or shutil.which("spirv-val")
    if not validator:
        pytest.skip("compiled; no spirv-val to validate with (apt install spirv-tools)")
    module = tmp_path / "module.spv"
    module.write_bytes(code)
    command = (validator,) if isinstance(validator, str) else validator
    done = subprocess.run([*command, "--target-env", "vulkan1.1", module], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def compiled_before() -> list[Path]:
    """The modules that the other tests left; ask for them before `library`."""
    return compiled()


def link_private_tools(project: Path) -> None:
    if (ROOT / shaderlib.PRIVATE).exists():
        (project / shaderlib.PRIVATE).symlink_to(ROOT / shaderlib.PRIVATE)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the sources that may be changed, an empty cache, nothing shipped."""
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
def test_threads_that_want_the_same_compile_it_once(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        path.write_text(path.read_text().replace("return", "return ") + "\n")
        forget()
        shaderlib.spirv("add", "f32")
    assert compiled == ["add.f32"] * 3


@needs_compiler
def test_damaged_cache_entry_is_compiled_again(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = shaderlib.spirv("add", "f32")
    (entry,) = compiled()
    whole = entry.read_bytes()
    for damaged in (b"\0" * 64, whole[:-4], whole[: len(whole) // 8 * 4], code, code[: len(code) // 8 * 4]):
        entry.write_bytes(damaged)
        forget()
        assert shaderlib.spirv("add", "f32") == code and entry.read_bytes() == whole


@needs_compiler
def test_compiler_errors_surface(library: Path) -> None:
    (library / "add.comp").write_text("#version 450\nvoid main() { undeclared = 1; }\n")
    with pytest.raises(UnsupportedFeature, match=r"(?s)add\.f32.*undeclared"):
        shaderlib.spirv("add", "f32")


@needs_compiler
@pytest.mark.parametrize(
    ("weights", "op", "lacks"),
    [("weights", "mat_vec", "no block description and no decode4"), ("dot_weights", "mat_dot", "no quants")],
)
def test_a_format_that_no_shader_knows_is_told(library: Path, weights: str, op: str, lacks: str) -> None:
    """In the manifest alone; or of formats with blocks, one that has no codes of int8."""
    new = "q9_9" if weights == "weights" else "iq3_s"
    path = library / "variants.toml"
    path.write_text(path.read_text().replace(f"\n{weights} = [", f'\n{weights} = [ "{new}",'))
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
    # Most of the manifest, which would take a minute to compile once more.
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
        assert shaderlib.is_whole(shaderlib.spirv(op, variant))


@needs_compiler
@pytest.mark.parametrize("damage", ["module", "missing", "index"])
def test_a_damaged_package_is_told(
    library: Path, damage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module is compiled again, and no driver sees half of it where no compiler is."""
    monkeypatch.setattr(shaderlib, "variants", lambda: [("add", "f32")])
    assert shaderlib.build(library / "spv") == 1
    code, module = shaderlib.spirv("add", "f32"), library / "spv" / "add.f32.spv"
    if damage == "index":
        (library / "spv" / "index.json").write_text("[" * 100_000)
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
def test_what_is_a_whole_module(library: Path) -> None:
    code = shaderlib.spirv("add", "f32")
    assert shaderlib.is_whole(code)
    assert not any(shaderlib.is_whole(code[:n]) for n in range(len(code)))
    assert not shaderlib.is_whole(code + b"\0\0\0\0") and not shaderlib.is_whole(bytes(len(code)))


@needs_compiler
def test_a_compiler_whose_disk_is_full(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """glslang ends with 0 all the same; half a module must not be kept."""
    run = subprocess.run

    def half(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        done = run(command, **options)  # type: ignore[call-overload]
        if "-o" in command:
            out = Path(command[command.index("-o") + 1])
            out.write_bytes(out.read_bytes()[:400])
        return done

    monkeypatch.setattr(subprocess, "run", half)
    with pytest.raises(UnsupportedFeature, match=r"wrote 400 bytes of add\.f32 .*TMPDIR"):
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
    done = subprocess.run([*pip, tmp_path, project], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    built = [pair for pair in shaderlib.variants() if shaderlib.is_available(*pair)]
    modules = {f"vkbackend/shaders/spv/{op}.{variant}.spv" for op, variant in built}
    assert modules | {"vkbackend/shaders/spv/index.json", "vkbackend/shaders/lib/step.glsl"} <= names


def test_op_cases_record_every_variant() -> None:
    """Each variant of the manifest occurs in a case."""
    import numpy as np

    from vkbackend.recording import Dispatch
    from vkbackend.twins.device import NullDevice

    seen = set()
    for case in (*op_cases.CASES, *op_cases.FORMAT_CASES):
        placed = op_setup.Placed(NullDevice("null"), case.setup(np.random.default_rng(1)))
        needs = frozenset(name for spec in ops.OPS.values() for name in spec.needs)
        for api in ("khr", "nv") if case.needs else ("khr",):
            limits = replace(Limits.floor(), features=needs, matrix_units=MatrixUnits(api))
            seen |= {(c.op, c.variant) for c in placed.record(limits).accesses() if isinstance(c, Dispatch)}
    assert seen == set(shaderlib.variants())


BUILD = {"vkbackend.shaderlib", "vkbackend.cache_folder", "vkbackend.env", "vkbackend.errors"}


@pytest.mark.parametrize("module", sorted(BUILD))
def test_a_build_imports_only_what_is_there(module: str) -> None:
    """setup.py imports shaderlib where nothing but setuptools is installed."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    imported = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module == "vkbackend":
            imported |= {f"vkbackend.{alias.name}" for alias in n.names}
        elif isinstance(n, ast.ImportFrom) and n.module:
            imported.add(n.module)
    assert all(name.partition(".")[0] in sys.stdlib_module_names or name in BUILD for name in imported)
