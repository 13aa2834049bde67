"""Metadata of any type and value is either read or refused by a typed error that names the key."""

from __future__ import annotations

import math
import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from gguf_files import ARRAY, F32, STRING, array, payload, vocabulary, with_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.fixture import write
from oracles.fixtures import FIXTURES, build
from random_cases import examples

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.gguf import reader
from vkbackend.models.gguf.fingerprint import fingerprint
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.placement.layout import lay_out
from vkbackend.models.placement.tensors import check_weights, notes, weights_in_file
from vkbackend.models.text.tokenizer import Tokenizer, chat_templates, end_ids

pytestmark = pytest.mark.no_vulkan

VOCABULARIES = {"tokens of SPM": "llama", "tokens of BPE": "gpt2", "tokens of Gemma 4": "gemma4"}
QUICK = ("gemma4+experts", "qwen3next")
CONTAINER = ("general.alignment", "split.count", "split.no", "split.tensors.count")


def lay_out_model(gguf: GGUF) -> None:
    """Derive everything that depends on the metadata, up to the point where a device would be opened."""
    model = load_model(gguf)
    types = check_weights(gguf, model)
    notes(gguf, model, 64)
    weights_in_file(gguf, model)
    fingerprint(gguf)
    for table in model.ropes(64).values():
        table.rows(np.arange(64))
    for n_devices in (1, 2):
        lay_out(model, types, n_devices, Options("any.gguf", n_ctx=64))


def read_text(gguf: GGUF) -> None:
    chat_templates(gguf)
    end_ids(gguf)
    Tokenizer.from_gguf(gguf).encode("ab <x>", parse_special=True)


class Asked(reader.Metadata):
    keys: set[str] = set()  # noqa: RUF012

    def __contains__(self, name: object) -> bool:
        self.keys.add(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        self.keys.add(name)
        return super().__getitem__(name)


@cache
def made(name: str) -> tuple[bytes, list[str]]:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "m.gguf"
        if name not in VOCABULARIES:
            write(build(name), path)
        else:
            tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "a", "b", "ab", "<x>"]
            types = [2, 3, 3, *[6] * 256, 1, 1, 1, 4]
            scores = array("tokenizer.ggml.scores", F32, [0.0] * len(tokens))
            merges = array("tokenizer.ggml.merges", STRING, ["a b"])
            path.write_bytes(vocabulary(VOCABULARIES[name], tokens, types=types, extra=[scores, merges]))
        patch.setattr(reader, "Metadata", Asked)
        Asked.keys = set()
        with GGUF.open(path) as gguf:
            (read_text if name in VOCABULARIES else lay_out_model)(gguf)
        return path.read_bytes(), sorted(Asked.keys | {*CONTAINER, "tokenizer.chat_template"})


SPECIAL_FLOATS = [0.0, -1.0, 1e-40, 1e38, math.nan, math.inf, -math.inf]
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    **{
        kind: st.one_of(st.sampled_from([low, 0, 1, high]), st.integers(low, high))
        for kind, low, high in [
            *((kind, 0, (1 << bits) - 1) for kind, bits in ((0, 8), (2, 16), (4, 32), (10, 64))),
            *((kind, -1 << (bits - 1), (1 << (bits - 1)) - 1) for kind, bits in ((1, 8), (3, 16), (5, 32))),
            (11, -1 << 63, (1 << 63) - 1),
        ]
    },
    6: st.one_of(st.sampled_from(SPECIAL_FLOATS), st.floats(width=32)),
    7: st.booleans(),
    8: st.one_of(st.sampled_from(["", "yarn", "linear", "longrope", "gpt-2", b"\xff"]), st.text(max_size=5)),
    12: st.one_of(st.sampled_from([*SPECIAL_FLOATS, 1e308, -1e308]), st.floats()),
}


@st.composite
def values(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(sorted(SCALARS)))
    if draw(st.booleans()):
        return struct.pack("<I", kind) + payload(kind, draw(SCALARS[kind]))
    items = draw(st.lists(SCALARS[kind], max_size=6)) * draw(st.sampled_from([1, 1, 50]))
    return struct.pack("<IIQ", ARRAY, kind, len(items)) + b"".join(payload(kind, value) for value in items)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the test's huge numbers cause numpy warnings
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=[] if name in QUICK else pytest.mark.wide) for name in FIXTURES),
        *VOCABULARIES,
    ],
)
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_any_value_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    raw, asked = made(name)
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(raw)
    changed = data.draw(st.dictionaries(st.sampled_from(asked), values(), min_size=1, max_size=2))
    with GGUF.open(path) as gguf:
        raw = with_keys(gguf, changed)
    path.write_bytes(raw)
    try:
        with GGUF.open(path) as gguf:
            (read_text if name in VOCABULARIES else lay_out_model)(gguf)
    except (GGUFError, UnsupportedModel):
        pass


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
