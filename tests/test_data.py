"""The files of `tests/data` match their README, and derived files match their sources."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import derived
import gguf
import numpy as np
import pytest
from derived import DERIVED, derived_once, kind_of, load
from device_sets import nmse, some
from llama_float64 import forward
from material import DATA
from oracles import make_formats

from vkbackend.models.architectures.weight_specs import MATRIX_TYPES

MAX_NBYTES, MAX_WEIGHTS = 15 << 20, 700_000
README = (DATA / "README.md").read_text(encoding="utf-8")
FILES = sorted(path for path in DATA.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
MODELS = sorted(DATA.glob("*.gguf"))
# These bounds on the NMSE of a matrix are 1.2 times the measured errors. A wrong block, scale or bit order
# causes a far larger error.
ERRORS = {
    "Q2_K": 0.11, "Q3_K": 0.028, "Q4_K": 6.3e-3, "Q5_K": 1.6e-3, "Q6_K": 3.9e-4, "IQ4_NL": 7.1e-3,
    "IQ4_XS": 7.2e-3, "IQ3_S": 0.024, "IQ3_XXS": 0.044, "IQ2_S": 0.08, "IQ2_XS": 0.12, "IQ2_XXS": 0.15,
    "IQ1_S": 0.32, "IQ1_M": 0.28,
}  # fmt: skip
TOKENS = [1, *np.random.default_rng(5).integers(3, 500, 15).tolist()]


def patterns() -> list[str]:
    cells = (line.split("|")[1] for line in README.splitlines() if line.startswith("| `"))
    globs = []
    for word in (word for cell in cells for word in re.findall(r"`([^`]+)`", cell)):
        head, _, rest = word.partition("{")
        choices, _, tail = rest.partition("}")
        globs += [f"{head}{choice}{tail}" for choice in choices.split(",")]
    return globs


def test_every_file_is_small_and_in_the_readme() -> None:
    named = {path for pattern in patterns() for path in DATA.glob(pattern)}
    named |= {path for path in FILES if path.suffix == ".py" or path.name == "README.md"}
    assert set(FILES) == named
    assert all(path.name in README for path in FILES if path.suffix == ".py")
    assert sum(path.stat().st_size for path in FILES) <= MAX_NBYTES


def test_the_trained_model_has_rows_of_256_in_every_format() -> None:
    reader = gguf.GGUFReader(DATA / "stories-w256-F16.gguf")
    matrices = [t for t in reader.tensors if len(t.shape) > 1]
    assert sum(t.n_elements for t in reader.tensors) <= MAX_WEIGHTS
    assert {int(t.shape[0]) % 256 for t in matrices} == {0}
    formats = {path.stem.removeprefix("stories-w256-").lower() for path in MODELS if "w256" in path.stem}
    formats |= {name.removeprefix("stories-w256-").lower() for name in DERIVED if "w256" in name}
    # these formats have golden blocks instead of files
    assert formats == set(MATRIX_TYPES) - set(make_formats.FORMATS)


@pytest.mark.parametrize("dtype", some(ERRORS, 4))
def test_quantized_files_hold_the_trained_weights(dtype: str) -> None:
    path, source = DATA / f"stories-w256-{dtype}.gguf", load(DATA / "stories-w256-F16.gguf")
    held = load(path)
    assert held.keys == source.keys and list(held.tensors) == list(source.tensors)
    for t in gguf.GGUFReader(path).tensors:
        values = source.tensors[t.name]
        assert t.tensor_type == kind_of(t.name, values, dtype)
        assert nmse(held.tensors[t.name], values) <= (ERRORS[dtype] if values.ndim > 1 else 0)


@pytest.mark.parametrize("name", ["wide-F16", "wide-Q8_0"])
def test_a_widened_model_is_the_same_function(models: Path, name: str) -> None:
    """F16 values that are multiplied by a power of two lose bits only if they are small. Q8_0 has a rounding
    error of 1e-5."""
    want = forward(models / "stories-narrow-F16.gguf", TOKENS)
    got = forward(models / f"stories-{name}.gguf", TOKENS)
    assert nmse(got, want) <= (1e-8 if name.endswith("F16") else 1e-3)


def test_biases_and_the_choice_of_experts_matter(models: Path) -> None:
    """The bound is a hundred times the tolerance of other tests, so these tests would notice missing biases
    or wrong experts."""
    want = forward(models / "stories-wide-Q8_0.gguf", TOKENS)
    assert nmse(forward(models / "stories-qwen2-Q8_0.gguf", TOKENS), want) > 1e-2
    path = models / "stories-moe8x-Q4_0.gguf"
    others = [np.tile([6, 7], (len(TOKENS), 1))] * 5
    assert nmse(forward(path, TOKENS, ids=others), forward(path, TOKENS)) > 1e-2


def test_every_model_file_has_goldens() -> None:
    for folder, names in ((DATA, [path.stem for path in MODELS]), (DATA / "derived", DERIVED)):
        expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
        with np.load(folder / "expected_logits.npz") as logits:
            assert set(expected) == set(logits.files) == set(names)
            for name, said in expected.items():
                assert len(said["greedy_tokens"]) == 48 and said["min_margin"] > 0.05, name
                assert logits[name].shape == (len(said["prompt_tokens"]), 512), name


# ---- against other programs ----


@pytest.mark.oracle
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="not installed: xllamacpp")
def test_llama_cpp_still_gives_the_golden_logits(models: Path) -> None:
    from data.make_models import llama_cpp_answer

    expected = json.loads((models / "expected.json").read_text(encoding="utf-8"))
    with np.load(models / "expected_logits.npz") as logits:
        for name in [*(path.stem for path in MODELS), *DERIVED]:
            answer, got = llama_cpp_answer(models / f"{name}.gguf", expected[name]["prompt"])
            assert answer == expected[name] and nmse(got, logits[name]) <= 1e-10, name


@pytest.mark.oracle
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="not installed: xllamacpp")
def test_llama_cpp_still_gives_the_golden_ids(tmp_path: Path) -> None:
    from data.make_vocabularies import MAKE, vectors
    from oracles import llama_cpp

    for name, make in MAKE.items():
        path = DATA / "vocab" / f"{name}.gguf"
        assert make() == path.read_bytes(), "learnt from other text, or in another way"
        kept, vocabulary = (
            json.loads(path.with_suffix(".json").read_text(encoding="utf-8")),
            llama_cpp.Vocabulary(path),
        )
        assert kept["texts"] == vectors() and kept["ids"] == [vocabulary.encode(t) for t in vectors()]
        assert kept["parsed"] == [vocabulary.encode(t, True, True) for t in vectors()]
        vocabulary.close()


@pytest.mark.oracle
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="not installed: xllamacpp")
def test_llama_cpp_still_quantizes_alike(tmp_path: Path) -> None:
    from data import make_models

    for path in make_models.quantize(tmp_path):
        assert path.read_bytes() == (DATA / path.name).read_bytes(), path.name


def test_derived_files_are_made_once_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Path] = []

    def derive(data: Path, folder: Path) -> None:
        (folder / "a.gguf").touch()
        runs.append(folder)
        if len(runs) == 1:
            raise OSError("no space left")

    monkeypatch.setattr(derived, "derive", derive)
    with pytest.raises(OSError, match="no space"):
        derived_once(DATA, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["derived.lock"]
    folder = derived_once(DATA, tmp_path)
    assert derived_once(DATA, tmp_path) == folder and len(runs) == 2
    assert [path.name for path in folder.iterdir()] == ["a.gguf"]
    monkeypatch.setattr(derived, "version", lambda package: "another")
    assert derived_once(DATA, tmp_path) != folder and len(runs) == 3
