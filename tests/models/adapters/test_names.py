"""PEFT's modules of every architecture are mapped to the right GGUF tensors, or are refused. The test
compares only state dicts, which the oracles create from a fixture's tensors, so `transformers` is not
needed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from adapters import random_pairs, write_adapter
from device_sets import wide
from gguf import MODEL_ARCH_NAMES
from oracles.fixture import Fixture, write
from oracles.fixtures import FIXTURES, build

from vkbackend.errors import AdapterError, UnsupportedModel
from vkbackend.models.adapters.gguf_adapter import read_gguf_adapter
from vkbackend.models.adapters.peft_names import PeftNames
from vkbackend.models.adapters.stacks import low_rank_specs
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.gguf.reader import GGUF

pytestmark = pytest.mark.no_vulkan

# (architecture, part of a module's name): the adapters of these modules are refused by name. If transformers
# lacks a model, the oracle uses a stand-in with other modules.
REFUSED = {
    ("qwen35", "linear_attn"), ("qwen35moe", "linear_attn"), ("qwen3next", "in_proj_qkvz"),
    ("gemma3n", "altup"), ("granitemoe", "shared_mlp.input_linear"), ("granitemoe", "router"),
    ("granitehybrid", "shared_mlp.input_linear"), ("granitehybrid", "router"), ("kimi-linear", "forget_gate"),
    ("bloom", "query_key_value"), ("falcon", "query_key_value"), ("gptneox", "query_key_value"),
    ("maincoder", "self_attn"),
    ("plamo", "self_attn"), ("hy_v4", "self_attn"), ("bailingmoe2", "self_attn"), ("codeshell", "self_attn"),
    ("openelm", "self_attn"), ("plamo3", "self_attn"), ("plamo3", "gate_proj"), ("qwen", "self_attn"),
}  # fmt: skip
# The stand-in's down projection of the shared expert is doubled, because its gate is 1/2.
DOUBLED = {("deepseek", "shared_expert.down_proj"), ("bailingmoe", "shared_expert.down_proj")}
PRODUCTS = re.compile(r"_proj|linear|\.c_|router|dense|query_key_value")
QUICK = ("llama", "phi3", "gpt2", "qwen35", "nemotron_h", "qwen2moe", "internlm2", "gptneox")


class Library(MagicMock):
    """Models and configs are classes, because a subclass of a mock can be called only once."""

    def __getattr__(self, name: str) -> Any:
        if name.endswith(("Config", "ForCausalLM")):
            return type(name, (), {"__init__": lambda self, *args, **values: self.__dict__.update(values)})
        return super().__getattr__(name)


class Mocks(MetaPathFinder, Loader):
    """Imports torch, transformers and their submodules as mocks."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        there = fullname.partition(".")[0] in ("torch", "transformers")
        return spec_from_loader(fullname, self, is_package=True) if there else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return Library()

    def exec_module(self, module: Any) -> None:
        pass


@pytest.fixture(scope="module")
def builders() -> Iterator[dict[str, Callable[[Fixture], Any]]]:
    """The oracles' builders, whose modules import torch and transformers."""
    with pytest.MonkeyPatch.context() as patch:
        before = set(sys.modules)
        patch.setattr(sys, "meta_path", [Mocks(), *sys.meta_path])
        from oracles import hf
        from oracles.hf_parts import BUILDERS

        assert hf.BUILDERS is BUILDERS
        yield BUILDERS
        for name in set(sys.modules) - before:
            if name.startswith(("oracles.hf", "torch", "transformers")):
                del sys.modules[name]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else wide(pytest.param(name, id=name)) for name in FIXTURES]
)
def test_modules(builders: dict[str, Callable[[Fixture], Any]], name: str) -> None:
    if name not in builders:
        pytest.skip("transformers has no such model")
    fixture = build(name)
    _, state = builders[name](fixture)
    if state.keys() == fixture.tensors.keys():
        pytest.skip("the reference has the names of GGUF tensors")
    head_dim = fixture.keys.get("attention.key_length") or 1
    try:
        names = PeftNames("adapter", fixture.arch, fixture.keys["block_count"], head_dim)
    except UnsupportedModel as error:
        assert fixture.arch not in MODEL_ARCH_NAMES.values() and "not known" in str(error)
        return
    n_mapped = 0
    for key, weight in state.items():
        module = key.removesuffix(".weight")
        if weight.ndim != 2 or not PRODUCTS.search(key) or not key.endswith(".weight"):
            continue
        try:
            target = names.target(f"base_model.model.{module}")
        except (AdapterError, UnsupportedModel) as error:
            assert any(arch == fixture.arch and part in module for arch, part in REFUSED), (module, error)
            continue
        stored = fixture.tensors.get(target.tensor)
        ours = weight.T if fixture.arch == "gpt2" else weight  # PEFT's A and B do not use Conv1D
        if any(arch == fixture.arch and module.endswith(end) for arch, end in DOUBLED):
            ours = ours / 2
        # If the model lacks the tensor, or a tensor of this shape, the adapter is refused.
        if stored is None or stored.shape != ours.shape:
            continue
        assert np.array_equal(names.rows(target.tensor, ours), stored), (module, target)
        n_mapped += 1
    assert n_mapped >= 2 or fixture.arch in ("qwen35", "qwen35moe")


def test_experts_with_a_module_each() -> None:
    names = PeftNames("adapter", "llama", 4, 16)
    target = names.target("base_model.model.model.layers.2.block_sparse_moe.experts.5.w2")
    assert (target.tensor, target.expert) == ("blk.2.ffn_down_exps.weight", 5)
    with pytest.raises(AdapterError, match="not a module"):
        names.target("base_model.model.vision_tower.layers.2.q_proj")
    prefixed = names.target("base_model.model.model.language_model.layers.1.self_attn.v_proj")
    assert prefixed.tensor == "blk.1.attn_v.weight"


@pytest.mark.parametrize("name", ["glm5-next", "deepseek2"])
def test_a_pair_has_the_name_of_the_file(name: str, tmp_path: Path) -> None:
    """The file stores `attn_q` as attn_q_b: whole in glm5-next, and together with `attn_q_shared` in
    deepseek2."""
    fixture, stored = build(name), "blk.1.attn_q_b.weight"
    pairs = random_pairs(fixture, 4, stored)
    adapter = read_gguf_adapter(str(write_adapter(tmp_path / "a.gguf", fixture.arch, pairs)), fixture.arch)
    with GGUF.open(write(fixture, tmp_path / "model.gguf")) as gguf:
        specs = load_model(gguf).weights()
    added = {spec.name: spec for spec in low_rank_specs([adapter], specs)}
    b = [spec for spec in added.values() if spec.name.endswith(".lora_b")]
    assert sum(spec.shape[0] for spec in b) == fixture.tensors[stored].shape[0]
    assert "blk.1.attn_q.weight.lora_b" in added
