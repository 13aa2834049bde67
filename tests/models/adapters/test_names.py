"""PEFT's modules of every architecture are mapped to the right GGUF tensors, or are refused. `transformers`
is not needed, because only the state dicts that the oracles make of a fixture's tensors are compared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from device_sets import wide
from oracles.fixture import Fixture
from oracles.fixtures import FIXTURES, build

from vkbackend.errors import AdapterError, UnsupportedModel
from vkbackend.models.adapters.peft_names import PeftNames

pytestmark = pytest.mark.no_vulkan

# (architecture, end of the module's name): modules of products that are refused by name
REFUSED = {
    ("qwen35", "linear_attn"), ("qwen35moe", "linear_attn"), ("qwen3next", "in_proj_qkvz"),
    ("gemma3n", "altup"), ("granitemoe", "shared_mlp.input_linear"), ("granitemoe", "router"),
    ("granitehybrid", "shared_mlp.input_linear"), ("granitehybrid", "router"), ("kimi-linear", "forget_gate"),
}  # fmt: skip
QUICK = ("llama", "phi3", "gpt2", "qwen35", "nemotron_h", "qwen2moe")


@pytest.fixture(scope="module")
def builders() -> Iterator[dict[str, Callable[[Fixture], Any]]]:
    """The oracles' builders, whose modules import torch and transformers."""
    with pytest.MonkeyPatch.context() as patch:
        before = set(sys.modules)
        for name in ("torch", "transformers", "transformers.modeling_outputs"):
            patch.setitem(sys.modules, name, MagicMock())
        from oracles import hf
        from oracles.hf_parts import BUILDERS

        assert hf.BUILDERS is BUILDERS
        yield BUILDERS
        for name in set(sys.modules) - before:
            if name.startswith("oracles.hf"):
                del sys.modules[name]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else wide(pytest.param(name, id=name)) for name in FIXTURES]
)
def test_modules(builders: dict[str, Callable[[Fixture], Any]], name: str) -> None:
    if name not in builders:
        pytest.skip("transformers has no such model")
    fixture = build(name)
    _, state = builders[name](fixture)
    head_dim = fixture.keys.get("attention.key_length") or 1
    try:
        names = PeftNames("adapter", fixture.arch, fixture.keys["block_count"], head_dim)
    except UnsupportedModel as error:
        assert fixture.arch in ("deepseek32", "cohere2moe") and "not known" in str(error)
        return
    n_mapped = 0
    for key, weight in state.items():
        module = key.removesuffix(".weight")
        is_product = weight.ndim == 2 and (
            "_proj" in key or "linear" in key or ".c_" in key or "router" in key
        )
        if not is_product or not key.endswith(".weight"):
            continue
        try:
            target = names.target(f"base_model.model.{module}")
        except (AdapterError, UnsupportedModel) as error:
            assert any(arch == fixture.arch and part in module for arch, part in REFUSED), (module, error)
            continue
        stored = fixture.tensors.get(target.tensor)
        if stored is None:  # the adapter is refused, because the model has no such tensor
            continue
        ours = weight.T if fixture.arch == "gpt2" else weight  # PEFT's A and B do not use Conv1D
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
