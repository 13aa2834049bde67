"""Public functions accept or refuse arguments of any type and value. numpy's scalars and arrays are accepted
as numbers and lists, and -1 has llama.cpp's meaning. Other values raise InvalidArgument, with one line that
names the argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_runner
import numpy as np
import pytest
from fake_runner import continuation
from gguf_files import F32, array, vocabulary

from vkbackend import LLM, Chat
from vkbackend.checks import MAX_SHOWN, shown
from vkbackend.errors import InvalidArgument
from vkbackend.models.options import Options
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.sampling.sampler import Sampler
from vkbackend.tools import cli

pytestmark = pytest.mark.no_vulkan

TOKENS = ["<unk>", "<s>", "</s>", *[f"▁w{i}." for i in range(32)]]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
HUGE = 10**5000


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setitem(sys.modules, "vkbackend.models.engine.runner.runner", fake_runner.MODULE)
    path = tmp_path / "words.gguf"
    scores = [array("tokenizer.ggml.scores", F32, [0.0] * len(TOKENS))]
    path.write_bytes(vocabulary("llama", TOKENS, types=[2, 3, 3, *[1] * 32], extra=scores))
    with LLM(path, n_ctx=64, n_slots=2) as opened:
        yield opened


class NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def id_of(value: Any) -> str:
    return shown(value)[:30]


# ---- refused arguments ----


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("kv_offload", v) for v in (np.array([True, False]), "no", None, 2, 1.0, [True])),
        *(("use_mmap", v) for v in ("yes", np.zeros(2))),
        *(("exact", v) for v in ("", None)),
        *(("process", v) for v in ("no", np.array([1, 0]))),
        *(("n_gpu_layers", v) for v in (np.array([1, 2]), "9" * 5000, HUGE)),
        *(("override_tensor", v) for v in (5, None, [5], b"ffn=CPU", np.array(5))),
        *(("progress", v) for v in (5, "yes", np.array([1]))),
        *(("devices", v) for v in (np.array(0), b"0", [HUGE])),
        *(("tensor_split", v) for v in (np.array([[3, 1]]), np.array(3), [HUGE])),
        *((name, HUGE) for name in ("n_ctx", "n_slots", "main_gpu", "submit_ahead", "n_snapshots")),
        ("n_ctx", NoRepr()),
        ("split_mode", np.array(["layer", "none"])),
        ("submit_ahead", "9" * 5000),
        ("control_vectors", np.array(5)),
        ("path", "a\0b"),
    ],
    ids=id_of,
)  # fmt: skip
def test_invalid_options(name: str, value: Any) -> None:
    options = {"control_vectors": ["v.gguf"]} if name == "control_vector_layer_range" else {}
    devices = {"devices": "numpy,numpy"} if name == "tensor_split" else {}
    with pytest.raises(InvalidArgument) as caught:
        LLM(**{"path": "nowhere.gguf", **options, **devices, name: value})
    text = str(caught.value)
    assert name in (caught.value.argument, *text.split("=")) or name.replace("_", " ") in text
    assert "\n" not in text and len(text) < MAX_SHOWN + 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, HUGE) for name in ("max_tokens", "temperature", "top_k", "top_p", "seed", "slot",
                                    "repeat_last_n")),
        ("temperature", np.bool_(True)),
        ("stop", np.array(5)),
        *(("ignore_eos", v) for v in (np.array([True, False]), "no")),
    ],
    ids=id_of,
)  # fmt: skip
def test_invalid_requests(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}="):
        llm.stream([1], **{name: value})


CALLS: list[Callable[[LLM], Any]] = [
    lambda llm: llm.detokenize(5),  # type: ignore[arg-type]
    lambda llm: llm.detokenize(None),  # type: ignore[arg-type]
    lambda llm: llm.detokenize([HUGE]),
    lambda llm: llm.detokenize([1], np.array([True, False])),  # type: ignore[arg-type]
    lambda llm: llm.tokenize("w1.", np.array([True, False])),  # type: ignore[arg-type]
    lambda llm: llm.generate([HUGE]),
    lambda llm: llm.logits([-HUGE]),
    lambda llm: llm.save_state("state", HUGE),
    lambda llm: Chat(llm, template=TEMPLATE).send(None),  # type: ignore[arg-type]
    lambda llm: Chat(llm, template=TEMPLATE).send(["w1."]),  # type: ignore[arg-type]
    lambda llm: Chat(llm, template=TEMPLATE).send([{"role": "user", "content": "w1."}]),  # type: ignore[arg-type]
    lambda llm: Chat(llm, template=5),  # type: ignore[arg-type]
    lambda llm: Chat(llm, system=["w1."], template=TEMPLATE),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("n", range(len(CALLS)))
def test_invalid_calls(llm: LLM, n: int) -> None:
    with pytest.raises(InvalidArgument):
        CALLS[n](llm)


@pytest.mark.parametrize(
    "words",
    ["-ngl", "--submit-ahead", "-ot ffn="],
)
def test_flags_of_5000_digits(capsys: pytest.CaptureFixture[str], words: str) -> None:
    flag, _, front = words.partition(" ")
    assert cli.main(["generate", "-dev", "numpy", "-n", "1", flag, front + "9" * 5000]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("command", [["bench", "-n"], ["bench", "-d"], ["bench-reduce", "--sizes"],
                                     ["bench-reduce", "--ahead"]])  # fmt: skip
def test_lists_of_5000_digits(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert cli.main([command[0], "-dev", "numpy,numpy", command[1], "9" * 5000]) == 2
    assert "error: " in capsys.readouterr().err


# ---- accepted arguments ----


@pytest.mark.parametrize(
    ("name", "value", "same"),
    [
        ("tensor_split", np.array([3, 1]), (3.0, 1.0)),
        ("tensor_split", np.array([0.75, 0.25], np.float32), (0.75, 0.25)),
        ("n_gpu_layers", -1, "auto"),
        ("n_gpu_layers", "-1", "auto"),
        ("type_k", np.str_("q8_0"), "q8_0"),
        ("split_mode", np.array("layer"), "layer"),
        ("override_tensor", [("ffn", 1)], (("ffn", "1"),)),
        ("control_vectors", [["v.gguf", np.float32(0.5)]], (("v.gguf", 0.5),)),
    ],
    ids=str,
)  # fmt: skip
def test_options_are_plain_values(name: str, value: Any, same: Any) -> None:
    devices = {"devices": "0,1"} if name == "tensor_split" else {}
    value_of = getattr(Options.of("a", **{**devices, name: value}), name)
    assert value_of == same and type(value_of) is type(same)
    if isinstance(same, tuple):
        assert [type(item) for item in value_of] == [type(item) for item in same]


def test_layer_ranges_may_be_arrays() -> None:
    options = Options.of("a", control_vectors=["v"], control_vector_layer_range=np.array([1, 3]))  # type: ignore[arg-type]
    assert options.control_vector_layer_range == (1, 3)


def test_requests_of_numpy_values(llm: LLM) -> None:
    want = continuation([1, 8], 3)
    for values in (
        {"max_tokens": np.int32(3), "temperature": np.float32(0), "stop": None, "slot": np.int64(1)},
        {"max_tokens": np.array(3), "temperature": np.array(0.0), "seed": np.uint64(7), "stop": np.array([])},
    ):
        done = llm.generate(np.array([1, 8]), ignore_eos=np.True_, **values)  # type: ignore[arg-type]
        assert done.tokens == want
    assert llm.detokenize(np.array([3, 4])) == llm.detokenize([3, 4]) == "w0. w1."


def test_minus_one_as_in_llama_cpp(llm: LLM) -> None:
    whole = llm.generate([1, 8], temperature=0, ignore_eos=True)
    same = llm.generate([1, 8], -1, temperature=0, ignore_eos=True, seed=-1)
    assert (
        same.tokens == whole.tokens and len(same.tokens) == llm.n_ctx - 1 and same.finish_reason == "length"
    )
    assert same.seed >= 0
    assert SamplingParams(seed=-1).seed != SamplingParams(seed=-1).seed


def test_repeat_last_n_of_minus_one_is_the_whole_text() -> None:
    logits, history = np.array([1.0, 2.0, 3.0], np.float32), [2, *[0] * 100]

    def chosen(last: int) -> int:
        params = SamplingParams(temperature=0, repeat_penalty=10.0, repeat_last_n=last)
        sampler = Sampler(params)
        assert sampler.n_candidates(history) == 1 + len(
            set(history[-last:] if last > 0 else history if last else [])
        )
        return sampler.sample(logits, history)

    assert (chosen(-1), chosen(101), chosen(100), chosen(0)) == (1, 1, 2, 2)
