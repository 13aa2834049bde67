from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.fixture import Fixture, write
from oracles.fixtures import build
from runners import load_runner
from tiny_models import Tiny, tensors, write_tiny

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.models.architectures.reading import is_off
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.export import write_gguf
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.llm import LLM
from vkbackend.tools.cli import main

TOKENS = list(range(12))


def llm_logits(path: Path) -> np.ndarray:
    with LLM(path, devices=["numpy"], n_ctx=32, n_ubatch=16) as llm:
        return llm.logits(TOKENS)


def with_nextn(folder: Path, n_ahead: int = 1) -> Path:
    tiny = Tiny("llama", "Q8_0", n_layer=5, keys={"nextn_predict_layers": n_ahead})
    more = {
        "blk.4.nextn.eh_proj.weight": np.ones((64, 128), np.float32),
        "blk.4.nextn.enorm.weight": np.ones(64, np.float32),
    }
    return write_tiny(folder / f"nextn{n_ahead}.gguf", tiny, more)


def test_multi_token_prediction_layers_are_skipped_with_a_note(tmp_path: Path) -> None:
    path = with_nextn(tmp_path)
    same = dict(tensors(Tiny("llama", n_layer=5)))
    four = write_tiny(
        tmp_path / "four.gguf",
        Tiny("llama", "Q8_0"),
        {name: values for name, values in same.items() if not name.startswith("blk.4.")},
    )
    assert np.array_equal(llm_logits(path), llm_logits(four))
    with LLM(path, devices=["numpy"], n_ctx=32, n_ubatch=16) as llm:
        [note] = llm.notes
        assert "(nextn): 18 (blk.4." in note
    with LLM(four, devices=["numpy"], n_ctx=32, n_ubatch=16) as llm:
        assert llm.notes == []
    with LLM(four, devices=["numpy"], n_ctx=1 << 12, n_ubatch=16) as llm:
        assert "context of 4096 tokens is longer than the" in llm.notes[0]


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "-p", "0", "-n", "1", "-r", "1", "-d", "0"],
        ["sweep", "-p", "4", "-n", "1", "-c", "8"],
        ["export", "-o", "copy.gguf"],
        ["generate", "-c", "8"],
        ["plan", "-ts", "1"],
    ],
    ids=lambda words: words[0],
)
def test_every_command_prints_the_note_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main([*words, "-m", str(with_nextn(tmp_path)), "-dev", "numpy"])
    output = capsys.readouterr()
    lines = [line for line in (output.out + output.err).splitlines() if "(nextn)" in line]
    assert (
        len(lines) == 1
        and "unused tensors of layers that predict tokens further ahead (nextn): 18 (" in lines[0]
    ), output


def test_export_keeps_multi_token_prediction_layers(tmp_path: Path) -> None:
    path, out = with_nextn(tmp_path), tmp_path / "out.gguf"
    runner = load_runner(path, devices=["numpy"] * 2, n_ctx=32, n_ubatch=1)
    try:
        with GGUF.open(path) as source:
            write_gguf(out, source, runner.mesh.devices, runner.mesh.weights, runner.model.weights())
    finally:
        runner.close()
    assert out.read_bytes() == path.read_bytes()


def test_without_the_key_these_tensors_are_unread(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"2 tensors that llama does not use: blk.4.nextn.eh_proj"):
        llm_logits(with_nextn(tmp_path, n_ahead=0))
    with pytest.raises(GGUFError, match="nextn_predict_layers is 5"):
        llm_logits(with_nextn(tmp_path, n_ahead=5))


def test_an_unknown_architecture_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'gpt9' is not supported; supported are: llama, .*phi3"):
        llm_logits(write_tiny(tmp_path / "model.gguf", Tiny("gpt9")))


@pytest.mark.parametrize("value", [0, 0.0, False, -math.inf, [], [0, 0], [-math.inf], ""])
def test_off_values(value: Any) -> None:
    assert is_off(value) and is_off(np.asarray(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("value", [1, -1.0, True, math.inf, math.nan, [0, 1], "none"])
def test_values_that_are_on_are_refused(value: Any) -> None:
    assert not is_off(value)


@pytest.mark.parametrize(
    "keys",
    [
        {
            "attention.scale": 0.0,
            "attention.sliding_window": 0,
            "expert_count": 0,
            "nextn_predict_layers": 0,
            "rope.scaling.attn_factor": 0.0,
            "rope.scaling.factor": 0.0,
        },
        {
            "attention.clamp_kqv": -math.inf,
            "attention.scale": -math.inf,
            "expert_weights_scale": 0.0,
            "rope.dimension_count": 0,
            "rope.scaling.type": "",
        },
        {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    ],
)
def test_keys_at_their_off_value_mean_absent(tmp_path: Path, keys: dict[str, Any]) -> None:
    plain = write_tiny(tmp_path / "plain.gguf", Tiny("llama"))
    assert np.array_equal(
        llm_logits(write_tiny(tmp_path / "off.gguf", Tiny("llama", keys=keys))), llm_logits(plain)
    )


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("qwen35", {"full_attention_interval": 0}),
        ("gemma4", {"attention.key_length_swa": 0}),
    ],
    ids=str,
)
def test_defaults_of_architectures(tmp_path: Path, name: str, keys: dict[str, Any]) -> None:
    off, absent = build(name), build(name)
    off.keys |= keys
    for key, value in keys.items():
        if value:
            absent.keys[key] = value
        else:
            absent.keys.pop(key, None)

    def outcome(fixture: Fixture, path: str) -> str:
        try:
            with GGUF.open(write(fixture, tmp_path / path)) as gguf:
                return repr([weight for weight in load_model(gguf).weights()])
        except GGUFError as error:
            return str(error).partition(": ")[2]

    assert outcome(off, "off.gguf") == outcome(absent, "absent.gguf")
