from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from oracles.fixture import write
from oracles.fixtures import FIXTURES, build
from places import ROOT

from vkbackend.models.architectures.memory_specs import KVSpec, StateSpec
from vkbackend.models.architectures.registry import ARCHITECTURES, ENCODERS, MODELS, load_model
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.placement.layout import lay_out
from vkbackend.tools.architectures import DIMS, TESTS, proofs, row_of
from vkbackend.tools.cli import main


def test_every_architecture_has_a_row_and_a_model_that_tests_run() -> None:
    assert {name.split("+")[0] for name in FIXTURES} >= set(ARCHITECTURES)
    for row in map(row_of, ARCHITECTURES):
        assert row.models and len(row.models) < 60, row
    assert all(models and len(models) < 60 for models in ENCODERS.values()), ENCODERS


def test_the_model_files_are_all_listed() -> None:
    files = {
        path.stem.replace("_", "-")
        for path in (ROOT / "models" / "architectures").glob("*.py")
        if "\nclass Model(" in path.read_text(encoding="utf-8") and path.stem != "base"
    }
    assert {name.replace("_", "-") for name in (*ARCHITECTURES, *ENCODERS)} == files


def test_model_files_are_short_and_use_only_roles() -> None:
    wrong = []
    for name in (*ARCHITECTURES, *ENCODERS):
        text = (ROOT / "models" / "architectures" / f"{name.replace('-', '_')}.py").read_text(
            encoding="utf-8"
        )
        short = text.count("\n") <= 200 and text.startswith(f'"""{name} (')
        if not short or re.search(r"device|reduce|partial|n_gpu|mesh|vulkan", text, re.I):
            wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_flags_match_the_models(tmp_path: Path, name: str) -> None:
    windows = recurrent = experts = False
    dims: set[str] = set()
    for fixture in (f for f in FIXTURES if f.split("+")[0] == name):
        with GGUF.open(write(build(fixture), tmp_path / f"{fixture}.gguf")) as gguf:
            model = load_model(gguf)
            specs = [model.kv(il) for il in range(model.n_layer)]
            windows |= any(isinstance(spec, KVSpec) and spec.window > 0 for spec in specs)
            recurrent |= any(isinstance(spec, StateSpec) for spec in specs)
            experts |= model.n_used > 0
            dims |= {spec.role.dim for spec in model.weights()}
            types = {spec.name: "f32" for spec in model.weights()}
            for mode in ("tensor", "layer"):
                lay_out(model, types, 2, Options("a sketch", n_ctx=64, split_mode=mode))
    row = row_of(name)
    assert (row.windows, row.recurrent, row.experts) == (windows, recurrent, experts)
    assert {DIMS[dim] for dim in dims & set(DIMS)} <= set(row.split_by) and row.layer_split
    assert row.control_vectors and row.whole_slots == recurrent


@cache
def loaded(path: Path) -> ModuleType:
    spec = spec_from_file_location(f"named_{path.stem}", path)
    assert spec and spec.loader, path
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_tests_it_names_exist() -> None:
    columns = set(row_of("llama").cells()) - {"architecture", "models"}
    assert set(proofs()) == columns
    for tests in proofs().values():
        assert tests
        for test in tests:
            file, _, name = test.partition("::")
            module = loaded(ROOT / file)
            assert callable(getattr(module, name)) and name.startswith("test_"), test
            if file == TESTS:
                marks = [m for m in getattr(module, name).pytestmark if m.name == "parametrize"]
                assert set(FIXTURES) <= {fixture for m in marks for fixture in names_in(m)}, test


def names_in(mark: pytest.Mark) -> Iterator[str]:
    for param in mark.args[1] if "name" in mark.args[0] else ():
        values = getattr(param, "values", param)
        yield from (
            value for value in ([values] if isinstance(values, str) else values) if isinstance(value, str)
        )


def test_docs_have_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--md"]) == 0
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    assert printed.strip() in page, "put what `vkbackend models --md` prints into docs/architectures.md"
    left_out = re.findall(r"`([\w-]+)`", page[page.index("## Left out") :])
    assert left_out and not set(left_out) & set(ARCHITECTURES)


def test_the_readme_names_their_families() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| architectures | {len(ARCHITECTURES)} in " in text
    encoders = next(line for line in text.splitlines() if line.startswith("| encoders "))
    listed = encoders + text[text.index("### All architectures") : text.index("## Numbers")]
    for name, models in (MODELS | ENCODERS).items():
        family = re.search(r"[A-Z][A-Za-z]+|^[a-z]+(?=[-.])", models)
        assert family and family[0] in listed, (name, models)


def test_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = (*ARCHITECTURES, *ENCODERS)
    assert f"{len(ARCHITECTURES)} architectures and {len(ENCODERS)} encoders" in lines
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in names), lines
    assert main(["models", "--json"]) == 0
    table = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert tuple(table) == ARCHITECTURES
    assert table["qwen3next"]["recurrent"] and table["qwen3next"]["state_save"] == "whole slots"
    assert table["qwen3next"]["split_by"] == ["heads", "key heads", "ffn", "experts"]
    assert table["gemma3"]["windows"] and not table["gemma3"]["recurrent"]
    assert table["llama"]["tests"]["layer split"] == [f"{TESTS}::test_layers_on_different_devices"]


@pytest.mark.parametrize("page", ["README.md", "docs/architectures.md"])
def test_models_are_found_by_name(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = (
        "Qwen3.8-27B",
        "Qwen3.6-35B-A3B",
        "GLM-4.7-Flash",
        "gpt-oss-20b",
        "26B-A4B",
        "31B",
        "E4B",
        "qwen35",
    )
    assert [name for name in names if name not in text] == []
