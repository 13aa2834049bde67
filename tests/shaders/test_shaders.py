"""Shader sources agree with the op specs, the manifest and StepParams."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest

from vkbackend import ops, shaderlib, step, twins
from vkbackend.limits import Limits, MatrixUnits
from vkbackend.tools.op_cases import cases as op_cases
from vkbackend.tools.op_cases import setup as op_setup

pytestmark = pytest.mark.no_vulkan


def source(op: str) -> str:
    """Return an op's source with includes resolved and comments removed."""

    def text(name: str) -> str:
        code = re.sub(r"//[^\n]*", "", (shaderlib.shaders_dir() / name).read_text(encoding="utf-8"))
        return re.sub(r'#include "([^"]+)"', lambda m: text(m[1]), code)

    return text(f"{op}.comp")


# ---- every op has an entry in each table ----


def has_twin(op: str) -> bool:
    try:
        return callable(twins.twin_of(op))
    except NotImplementedError:
        return False


def places() -> dict[str, set[str]]:
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
    return [
        f"{op} lacks {place}" for op in every for place, ops_there in places.items() if op not in ops_there
    ]


def test_every_op_has_its_places() -> None:
    assert not missing_places(places())


@pytest.mark.parametrize("place", places())
def test_a_missing_place_is_named(place: str) -> None:
    without = {
        name: ops_there - {"rope"} if name == place else ops_there for name, ops_there in places().items()
    }
    assert missing_places(without) == [f"rope lacks {place}"]


@pytest.mark.parametrize("op", ops.OPS)
def test_twin_takes_the_ops_arguments(op: str) -> None:
    spec = ops.OPS[op]
    parameters = list(inspect.signature(twins.twin_of(op)).parameters.values())
    storage = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert storage == [*spec.arg_names, *(["step"] if spec.step else [])]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert keywords[: len(spec.push)] == [name for name, _ in spec.push]
    of_twin = [other for name, other in ops.OPS.items() if twins.twin_of(name) is twins.twin_of(op)]
    consts = {name.lower() for other in of_twin for name in other.consts}
    assert set(keywords[len(spec.push) :]) <= {"variant", "groups", *consts}


def test_op_cases_record_every_variant() -> None:
    import numpy as np

    from vkbackend.recording import Dispatch
    from vkbackend.twins.device import NullDevice

    seen = set()
    for case in (*op_cases.CASES, *op_cases.FORMAT_CASES):
        placed = op_setup.Placed(NullDevice("null"), case.setup(np.random.default_rng(1)))
        needs = frozenset(name for spec in ops.OPS.values() for name in spec.needs)
        for api in ("khr", "nv") if case.needs else ("khr",):
            limits = replace(
                Limits.floor(), features=needs, matrix_units=MatrixUnits(api), max_shared_nbytes=49_152
            )
            seen |= {(c.op, c.variant) for c in placed.record(limits).accesses() if isinstance(c, Dispatch)}
    assert seen == set(shaderlib.variants())


# ---- sources against specs ----


@pytest.mark.parametrize("op", ops.OPS)
def test_bindings(op: str) -> None:
    code, spec = source(op), ops.OPS[op]
    if spec.addressed:
        assert "binding = 0) readonly buffer" not in code.replace(
            "set = 1, binding = 0) readonly buffer Code", ""
        )
        return
    bindings = re.findall(
        r"layout\(set = 0, binding = (\d+)\) (?:(readonly|writeonly) )?buffer \w+ \{ \w+ (\w+)\[\]; \};", code
    )
    bindings = [row for row in bindings if row[2][-1] not in "14"]
    assert [(int(i), name) for i, _, name in bindings] == list(enumerate(spec.arg_names))
    for i, access, name in bindings:
        if int(i) not in spec.written:
            assert access == "readonly", f"{op}: {name} is only read"
        else:
            uses = len(re.findall(rf"\b{name}\[", code)) - 1
            writes = len(re.findall(rf"\b{name}\[[^;=]*\] = ", code))
            assert access == ("writeonly" if uses == writes else ""), (
                f"{op}: {name}, {uses} uses, {writes} writes"
            )
    binding = re.search(r"#define STEP_BINDING (\d+)", code)
    assert (binding is not None) == spec.step
    assert binding is None or int(binding[1]) == len(spec.args)
    assert ("buffer StepRows" in code) == spec.rows and len(spec.args) + spec.rows <= 8


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
    if spec.addressed:  # shaders can only write types that end in `Out`, and can only read other types
        kinds = [kind for _, kind in fields[: len(spec.args)]]
        assert [kind.endswith("Out") for kind in kinds] == [arg.endswith(":w") for arg in spec.args]
        heads = [(name, kind[0]) for name, kind in zip(spec.arg_names, kinds, strict=True)]
    assert [(name, kind[0]) for name, kind in fields] == [*heads, *spec.push]


@pytest.mark.parametrize("op", ops.OPS)
def test_specialization_constants(op: str) -> None:
    code = source(op)
    assert "layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;" in code
    constants = re.findall(r"layout\(constant_id = (\d+)\) const uint (\w+)", code)
    assert sorted((int(i), name) for i, name in constants) == list(enumerate(ops.OPS[op].consts))


@pytest.mark.parametrize("op", ops.OPS)
def test_portable_floor(op: str) -> None:
    """Ops without `needs` run on every GPU. Apart from includes and compiler hints, these ops use no
    extension, no types of 8 or 16 bits, and no trigonometric functions."""
    code = source(op)
    if ops.OPS[op].needs:
        assert "#extension" in code, f"{op} needs {ops.OPS[op].needs} and asks for nothing"
        # An op that uses subgroup operations needs full subgroups.
        assert "full_subgroups" in ops.OPS[op].needs or not re.search(r"\b(subgroup[A-Z]|gl_Subgroup)", code)
        return
    free = {"GL_GOOGLE_include_directive", "GL_EXT_control_flow_attributes"}
    assert set(re.findall(r"#extension (\w+)", code)) <= free
    assert not re.search(r"\b(u?int(8|16)_t|float16_t|subgroup\w+|sin|cos|pow)\b", code)


def test_step_layout() -> None:
    text = (shaderlib.shaders_dir() / "lib" / "step.glsl").read_text(encoding="utf-8")
    sizes = {name: int(n) for name, n in re.findall(r"uvec4 (\w+)\[(\d+)\];", text)}
    assert sizes == {"runs": step.MAX_RUNS, "states": step.MAX_RUNS}
    assert 16 * (1 + sum(sizes.values())) == step.BLOCK_NBYTES <= 16_384
    block = re.search(r"CELL_BLOCK = (\d+)", text)
    assert block is not None and int(block[1]) == ops.CELL_BLOCK


@pytest.mark.parametrize("path", sorted(shaderlib.shaders_dir().rglob("*.[cg]*")), ids=lambda path: path.name)
def test_lanes_of_a_subgroup_take_the_same_rounds(path: Path) -> None:
    """If the lanes of a subgroup run different numbers of rounds, a sum or shuffle after the loop may miss
    lanes. Few drivers support maximal reconvergence, which would make all lanes wait."""
    text = path.read_text(encoding="utf-8")
    if re.search(r"\bsubgroup(Add|Mul|Min|Max|Shuffle|Broadcast|Inclusive|Exclusive)", text):
        loops = re.findall(r"\bfor \(([^)]*)\)", text)
        assert not [loop for loop in loops if re.search(r"\blane\b|gl_SubgroupInvocationID", loop)]
