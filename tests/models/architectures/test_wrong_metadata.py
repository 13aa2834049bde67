"""Metadata of any type and value is either read or refused by a typed error that names the key."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from fuzz.metadata import VOCABULARIES, read_model, with_other_metadata
from gguf_files import BOOL, I32, U32, array, with_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.fixture import write
from oracles.fixtures import FIXTURES, build
from random_cases import examples

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.gguf.reader import GGUF

pytestmark = pytest.mark.no_vulkan

QUICK = ("gemma4+experts", "qwen3next")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the test's huge numbers cause numpy warnings
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=[] if name in QUICK else pytest.mark.wide) for name in FIXTURES),
        *VOCABULARIES,
    ],
)
@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_value_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, name: str, seed: int) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(with_other_metadata(random.Random(seed), name, path))
    try:
        with GGUF.open(path) as gguf:
            read_model(gguf, name)
    except (GGUFError, UnsupportedModel):
        pass


def array_of(kind: int, values: Sequence[int]) -> bytes:
    return array("", kind, values)[8:]


def f64(value: float) -> bytes:
    return struct.pack("<Id", 12, value)


@pytest.mark.parametrize(
    ("name", "changed", "pattern"),
    [
        (
            "gemma3",
            {"final_logit_softcapping": f64(-1.0)},
            "softcapping is -1.0, expected at least 0",
        ),
        ("gemma4", {"final_logit_softcapping": f64(1e300)}, "is 1e.300, expected a finite f32"),
        ("llama", {"attention.layer_norm_rms_epsilon": f64(1e300)}, "finite f32"),
        ("llama", {"rope.freq_base": f64(-1.0)}, "frequency base must be positive"),
        ("mistral3", {"rope.scaling.yarn_beta_fast": f64(-1.0)}, "beta_fast and beta_slow must be positive"),
        ("mistral3", {"rope.scaling.yarn_log_multiplier": f64(-1e30)}, "yarn_log_multiplier"),
    ],
)
def test_unusable_numbers_are_refused(
    tmp_path: Path, name: str, changed: dict[str, bytes], pattern: str
) -> None:
    path = write(build(name), tmp_path / "m.gguf")
    with GGUF.open(path) as gguf:
        raw = with_keys(gguf, {f"{name}.{key}": value for key, value in changed.items()})
    path.write_bytes(raw)
    with GGUF.open(path) as gguf, pytest.raises(GGUFError, match=pattern) as error:
        load_model(gguf)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("pattern", [array_of(BOOL, []), array_of(I32, []), struct.pack("<II", U32, 0)])
@pytest.mark.parametrize("name", ["cohere2moe+rms"])
def test_no_period_of_windows(tmp_path: Path, name: str, pattern: bytes) -> None:
    """Without the key for the period, every layer has a window."""
    path = write(build(name), tmp_path / "m.gguf")
    with GGUF.open(path) as gguf:
        raw = with_keys(gguf, {f"{gguf.architecture}.attention.sliding_window_pattern": pattern})
    path.write_bytes(raw)
    with GGUF.open(path) as gguf:
        assert all(layer.window for layer in load_model(gguf).config.layers)
