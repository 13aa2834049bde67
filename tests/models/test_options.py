"""Keywords, fields and flags of the options agree. Values have plain types, and errors suggest similar
names."""

from __future__ import annotations

import ast
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from runners import load_runner

from vkbackend import LLM, Chat
from vkbackend.errors import InvalidArgument, UnknownArgument
from vkbackend.meta.options import ReduceKeywords, ReduceOptions
from vkbackend.models.draft_options import DraftKeywords
from vkbackend.models.generate_options import AnswerKeywords, GenerateKeywords, GenerateOptions
from vkbackend.models.keywords import Keywords, ModelKeywords
from vkbackend.models.options import Options, with_a_share
from vkbackend.models.rope_options import RopeKeywords
from vkbackend.models.sampling.params import SamplingKeywords, SamplingParams
from vkbackend.options_class import check_fields, option
from vkbackend.tools import cli
from vkbackend.tools.flags.options import fields_given, options_of
from vkbackend.tools.flags.sampling import sampling_of

pytestmark = pytest.mark.no_vulkan

PAIRS = [(Keywords, Options), (ReduceKeywords, ReduceOptions),
         (SamplingKeywords, SamplingParams), (GenerateKeywords, GenerateOptions)]  # fmt: skip


def test_defaults_are_checked_once_and_seeds_are_drawn_each_time() -> None:
    checked = []

    def plain(name: str, value: Any) -> int:
        checked.append((name, value))
        return int(value)

    def drawn(name: str, value: Any) -> int:
        return next(numbers)

    numbers = iter(range(1, 9))

    @dataclass(frozen=True)
    class Made:
        kept: int = option(7, plain)
        seed: int = option(0, drawn)

        def __post_init__(self) -> None:
            check_fields(self)

    seeds = {Made().seed, Made().seed, Made(kept="3").seed}  # type: ignore[arg-type]
    assert len(seeds) == 3 and checked == [("kept", 7), ("kept", "3")]
    assert Made(kept="7").kept == 7  # type: ignore[arg-type]


@pytest.mark.parametrize(("keywords", "options"), PAIRS)
def test_keywords_are_the_fields(keywords: type, options: type) -> None:
    assert set(get_type_hints(keywords)) == {field.name for field in fields(options)} - {"path"}


@pytest.mark.parametrize("keywords", [ModelKeywords, DraftKeywords, ReduceKeywords, RopeKeywords,
                                      SamplingKeywords, AnswerKeywords, GenerateKeywords])  # fmt: skip
def test_every_keyword_is_described_with_its_default(keywords: type) -> None:
    """Editors show this text. Descriptions of switches and stop strings need no default."""
    (tree,) = ast.parse(inspect.getsource(keywords)).body
    assert isinstance(tree, ast.ClassDef)
    entries = [i for i, node in enumerate(tree.body) if isinstance(node, ast.AnnAssign)]
    assert entries
    for i in entries:
        name, text = ast.unparse(tree.body[i].target), tree.body[i + 1]  # type: ignore[attr-defined]
        assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant), name
        default = next(f.default for o in (Options, GenerateOptions) for f in fields(o) if f.name == name)
        said = f'"{default}"' if isinstance(default, str) else str(default)
        if not isinstance(default, bool | tuple) and name != "type_v":
            assert said in text.value.value and "efault" in text.value.value, name


@pytest.mark.parametrize(
    ("function", "keywords", "options"),
    [(LLM.__init__, Keywords, Options), (LLM.generate, GenerateKeywords, GenerateOptions),
     (LLM.stream, GenerateKeywords, GenerateOptions), (Chat.send, AnswerKeywords, GenerateOptions)],
)  # fmt: skip
def test_signatures_list_the_keywords(function: Any, keywords: type, options: type) -> None:
    parameters = inspect.signature(function).parameters
    defaults = {field.name: field.default for field in fields(options)}
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    assert {name: parameters[name].default for name in get_type_hints(keywords)} == {
        name: defaults[name] for name in get_type_hints(keywords)
    }


def test_an_options_object_is_plain_and_frozen() -> None:
    options = Options.of(
        Path("a.gguf"), devices=[0, "llvmpipe"], tensor_split=[3, 1], override_tensor=["ffn=CPU"],
        control_vectors=["v.gguf", (Path("w.gguf"), 2)], control_vector_layer_range=(1, 2),
        submit_ahead="all", n_gpu_layers="all",
    )  # fmt: skip
    assert (
        options.path == "a.gguf"
        and options.devices == ("0", "llvmpipe")
        and options.tensor_split == (3.0, 1.0)
    )
    assert (
        options.override_tensor == (("ffn", "CPU"),) and options.submit_ahead is options.n_gpu_layers is None
    )
    assert options.control_vectors == (("v.gguf", 1.0), ("w.gguf", 2.0))
    assert pickle.loads(pickle.dumps(options)) == options == replace(options)
    assert hash(options) == hash(replace(options))
    with pytest.raises(FrozenInstanceError):
        options.n_ctx = 3  # type: ignore[misc]
    with pytest.raises(InvalidArgument, match="n_ctx=-1"):
        replace(options, n_ctx=-1)


def test_devices_are_measured_if_they_differ_or_on_request() -> None:
    def auto(**options: Any) -> bool:
        return Options.of("a", **options).auto_split

    assert auto(devices="0,1") and auto(tensor_split="auto") and auto(devices="0,0", tensor_split="auto")
    assert not any(auto(**o) for o in ({}, {"devices": "0,0"}, {"devices": "0,numpy"},
                                       {"devices": "0,1", "tensor_split": [1, 1]},
                                       {"devices": "0,1", "split_mode": "layer"}))  # fmt: skip


def test_devices_without_a_share_are_left_out() -> None:
    options = Options.of("a", devices="0,1,2", tensor_split=[3, 0, 1])
    assert (with_a_share(options).devices, with_a_share(options).shares) == (("0", "2"), (3.0, 1.0))
    for named in ({"override_tensor": "ffn=1"}, {"split_policy": "llama.cpp"}):
        assert with_a_share(replace(options, **named)) == replace(options, **named)
    alone = with_a_share(replace(options, split_mode="none", main_gpu=2))
    assert (alone.devices, alone.shares, alone.main_gpu) == (("2",), None, 0)
    assert with_a_share(Options("a")) == Options("a")


# ---- flags ----

LOADING = ("generate", "chat", "plan", "bench", "sweep", "perplexity", "export")
# `chat` runs with a different `n_ctx` here. `sweep` has a longer default context, and `plan` balances shares
# by default.
OWN = {"chat": {"n_ctx": 64}, "sweep": {"n_ctx": 4096}, "plan": {"tensor_split": "auto"}}
NEEDED = {
    "chat": ["-c", "64"],
    "plan": ["-m", "x"], "perplexity": ["-m", "x", "-f", "x"], "export": ["-m", "x", "-o", "x"],
}  # fmt: skip


@pytest.mark.parametrize("command", LOADING)
def test_without_flags_options_are_the_defaults(command: str) -> None:
    args, _ = cli.parse([command, *NEEDED.get(command, [])])
    assert options_of(args, "x") == Options.of("x", **OWN.get(command, {}))


def test_every_option_has_a_flag() -> None:
    args, flags = cli.parse(["generate"])
    assert set(get_type_hints(Keywords)) - set(fields_given(args, Options)) == {
        "n_slots",
        "n_queue",
        "attention",
    }
    sampling = set(fields_given(args, SamplingParams))
    assert sampling == set(get_type_hints(SamplingKeywords)) - {"logits_processors"} and sampling < set(flags)
    first = sampling_of(args)
    assert replace(SamplingParams(), seed=first.seed) == first


def test_flags_become_options() -> None:
    words = "-dev 0,1 -ts 3/1 -c 64 -ub 8 -ctk f32 -ctv q8_0 --snapshots 1 -ngl 3 -ot ffn=CPU -ot attn=1 "
    words += (
        "--no-mmap -sm layer -mg 1 --split-policy llama.cpp -nkvo --reduce-provider scatter --submit-ahead 2 "
    )
    words += "--reduce-type f32 --exact --control-vector a,b --control-vector-scaled c:-2 "
    words += "--runtime native --control-vector-layer-range 1 3"
    args, _ = cli.parse(["generate", *words.split()])
    assert options_of(args, "x", n_slots=2) == Options.of(
        "x", devices=["0", "1"], tensor_split=[3, 1], n_ctx=64, n_ubatch=8, type_k="f32", type_v="q8_0",
        n_snapshots=1, n_gpu_layers=3, override_tensor=[("ffn", "CPU"), ("attn", "1")], use_mmap=False,
        split_mode="layer", main_gpu=1, split_policy="llama.cpp", kv_offload=False, reduce_provider="scatter",
        submit_ahead=2, reduce_type="f32", exact=True, control_vectors=["a", "b", ("c", -2)],
        runtime="native", control_vector_layer_range=(1, 3), n_slots=2,
    )  # fmt: skip


def test_one_object_reaches_runner_and_mesh(models: Path) -> None:
    path = models / "stories-narrow-F32.gguf"
    runner = load_runner(path, devices=["numpy"] * 2, n_ctx=32, n_ubatch=4, submit_ahead=1)
    try:
        assert runner.options == Options.of(
            path, devices=["numpy"] * 2, tensor_split=[1, 1], n_ctx=32, n_ubatch=4, submit_ahead=1
        )
        assert runner.mesh.options is runner.options
    finally:
        runner.close()


# ---- wrong names ----


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("device", "devices"), ("ctx", "n_ctx"), ("tensor_splits", "tensor_split"), ("proces", "process"),
     ("gpu_layers", "n_gpu_layers")],
)  # fmt: skip
def test_an_unknown_keyword_suggests_a_similar_name(wrong: str, near: str) -> None:
    with pytest.raises(UnknownArgument, match=rf"LLM\(\) takes no keyword '{wrong}'; did you mean '{near}'"):
        LLM("a.gguf", **{wrong: 1})
    with pytest.raises(TypeError):
        LLM("a.gguf", **{wrong: 1})
    with pytest.raises(UnknownArgument, match=r"'xyzzy'; it takes path, process, .*n_ctx"):
        LLM("a.gguf", **{"xyzzy": 1})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("function", "wrong", "near"),
    [(LLM.generate, "temp", "temperature"), (LLM.stream, "max_token", "max_tokens"),
     (LLM.stream, "slots", "slot"), (Chat.send, "topk", "top_k")],
)  # fmt: skip
def test_an_unknown_keyword_of_a_request_suggests_a_similar_name(
    function: Any, wrong: str, near: str
) -> None:
    with pytest.raises(UnknownArgument, match=f"takes no keyword '{wrong}'; did you mean '{near}'"):
        function(None, "text", **{wrong: 1})


def test_exact_is_f32_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VKBACKEND_EXACT", raising=False)
    assert Options.of("a model").reduce_type == "auto"
    assert Options.of("a model", exact=True).reduce_type == "f32"
    assert replace(Options.of("a model", exact=True), n_ctx=64).reduce_type == "f32"
    for wire in ("bf16", "f16"):
        with pytest.raises(InvalidArgument, match=rf"reduce_type='{wire}'.*exact=True"):
            Options.of("a model", exact=True, reduce_type=wire)
    monkeypatch.setenv("VKBACKEND_EXACT", "1")
    assert Options.of("a model").reduce_type == "f32"
    assert Options.of("a model", reduce_type="bf16").reduce_type == "bf16"
