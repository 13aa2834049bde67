"""The GGUF reader returns the same values as the reference reader on real files, and checks the types of
values."""

from __future__ import annotations

from pathlib import Path

import gguf as reference
import numpy as np
import pytest
from counted_calls import counted_calls
from gguf_files import (
    F32,
    STRING,
    array,
    gguf_bytes,
    key,
    vocabulary,
)
from gguf_reading import ARCH, sample, write

from vkbackend.errors import GGUFError
from vkbackend.models.gguf.reader import GGUF, Metadata

# ---- well-formed files ----


def test_values_and_tensors(tmp_path: Path) -> None:
    with GGUF.open(write(tmp_path, sample())) as g:
        assert g.architecture == "llama"
        assert dict(g.metadata).keys() == {"general.architecture", *(f"a.{k}" for k in _NAMES)}
        assert (g.u32("a.u32"), g.f32("a.f32"), g.boolean("a.bool"), g.get("a.u64")) == (
            7,
            0.5,
            True,
            1 << 40,
        )
        assert g.strings("a.strings") == ["x", "", "zwölf"]
        assert g.ints("a.ints").tolist() == [1, 2, 3]
        assert g.get("a.bools").tolist() == [True, False]
        w, b = g.tensors["w"], g.tensors["b"]
        assert (w.shape, w.type, w.nbytes, w.file) == ((2, 64), "q8_0", 136, 0)
        assert (b.shape, b.type, b.nbytes, b.offset - w.offset) == ((3,), "f32", 12, 160)
        assert g.data("w").tolist() == list(range(136))
        assert g.data("b").view(np.float32).tolist() == [1, 2, 3]
        assert not g.data("w").flags.writeable and not g.data("w").flags.owndata


_NAMES = ("u32", "f32", "bool", "u64", "strings", "ints", "bools")


def test_version_2_is_read(tmp_path: Path) -> None:
    assert GGUF.open(write(tmp_path, gguf_bytes([ARCH], version=2))).architecture == "llama"


@pytest.mark.parametrize("name", ["stories-narrow-F16", "stories-narrow-Q4_0", "stories-w256-IQ4_XS"])
def test_agrees_with_the_reference_reader(models: Path, name: str) -> None:
    path = models / f"{name}.gguf"
    theirs = reference.GGUFReader(path)
    with GGUF.open(path) as g:
        fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
        assert list(g.metadata) == list(fields)
        for k, f in fields.items():
            value = g.get(k)
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == f.contents(), k
        assert list(g.tensors) == [t.name for t in theirs.tensors]
        for t in theirs.tensors:
            ours = g.tensors[t.name]
            assert ours.shape == tuple(reversed(t.shape.tolist()))
            assert (ours.type, ours.offset, ours.nbytes) == (
                t.tensor_type.name.lower(),
                t.data_offset,
                t.n_bytes,
            )
            assert np.array_equal(g.data(t.name), t.data.view(np.uint8).ravel())


def test_opening_costs_one_call_per_token(tmp_path: Path) -> None:
    calls = []
    for n in (1_000, 151_000):
        types, floats = [1] * n, array("tokenizer.ggml.scores", F32, [0.0] * n)
        raw = vocabulary("llama", [f"token {i}" for i in range(n)], types=types, extra=[floats])
        path = write(tmp_path, raw)
        with counted_calls() as counted, GGUF.open(path) as g:
            pass
        calls.append(counted.total())
        with GGUF.open(path) as g:
            assert g.strings("tokenizer.ggml.tokens")[-1] == f"token {n - 1}"
    assert 150_000 <= calls[1] - calls[0] <= 151_000


def test_a_value_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`name in metadata` decodes no value, because decoding a vocabulary takes 0.1 s."""
    decoded, decode = list[str](), Metadata._strings
    monkeypatch.setattr(
        Metadata, "_strings", lambda self, key, v: decoded.append(key) or decode(self, key, v)
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([array("tokens", STRING, ["a", "b"])]))
    with GGUF.open(path) as g:
        assert "tokens" in g.metadata and not decoded
        assert g.strings("tokens") == ["a", "b"] and decoded == ["tokens"]


def test_close_keeps_views_alive(tmp_path: Path) -> None:
    g = GGUF.open(write(tmp_path, sample()))
    view = g.data("w")
    g.close()
    assert view[5] == 5
    for ask in (lambda: g.data("w"), lambda: g.get("a.u32")):
        with pytest.raises(GGUFError, match="after close"):
            ask()


# ---- typed reads ----


def test_errors_name_the_key_its_value_and_the_expected_type(tmp_path: Path) -> None:
    keys = [
        ARCH,
        key("f", F32, 1.5),
        key("nan", F32, float("nan")),
        key("large", 12, 1e300),
        key("neg", 5, -1),
        array("s", STRING, ["x"]),
    ]
    with GGUF.open(write(tmp_path, gguf_bytes(keys))) as g:
        for read, name, *words in (
            (g.u32, "f", "a f32", "an integer"),
            (g.u32, "neg", "-1", "an integer"),
            (g.u32, "gone", "missing", "an integer"),
            (g.f32, "nan", "nan", "finite"),
            (g.f32, "large", "1e+300", "finite f32"),
            (g.string, "s", "an array of 1 string", "a string"),
            (g.ints, "s", "an array of 1 string", "an array of integers"),
            (g.strings, "f", "a f32", "an array of strings"),
            (g.floats, "f", "a f32", "an array of floats"),
            (g.boolean, "f", "a f32", "a bool"),
        ):
            with pytest.raises(GGUFError) as e:
                read(name)
            assert all(word in str(e.value) for word in (repr(name), *words)), str(e.value)
        assert g.u32("gone", 3) == 3 and g.strings("gone", None) is None
        with pytest.raises(GGUFError, match="no tensor 'w'"):
            g.data("w")
