from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import fake_runner
import pytest
from gguf_files import BOOL, F32, STRING, U32, array, key, vocabulary

from vkbackend import LLM
from vkbackend.errors import InvalidArgument, UnknownArgument, UnsupportedModel
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.infill import infill_prompt
from vkbackend.models.text.tokenizer import Tokenizer

pytestmark = pytest.mark.no_vulkan

LETTERS = [chr(b) for b in range(0x21, 0x7F)] + ["\u0120", "\u010a"]
QWEN = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
CODE_LLAMA = ["\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>"]
DEEPSEEK = ["<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581end\uff5c>", "<\uff5cfim\u2581hole\uff5c>"]

Make = Callable[..., Tokenizer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(special: Sequence[str], *extra: bytes) -> Tokenizer:
        types = [1] * len(LETTERS) + [3] * len(special)
        keys = [
            array("tokenizer.ggml.merges", STRING, []),
            key("tokenizer.ggml.pre", STRING, "gpt-2"),
            *extra,
        ]
        path = tmp_path / "v.gguf"
        path.write_bytes(vocabulary("gpt2", [*LETTERS, *special], types=types, extra=keys))
        with GGUF.open(path) as gguf:
            return Tokenizer.from_gguf(gguf)

    return build


def shown(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special=False)


def test_the_layout(make: Make) -> None:
    tokenizer = make(QWEN)
    ids = infill_prompt(tokenizer, "def f(", "return x", files={"a.py": "x = 1\n", "b.py": ""})
    assert shown(tokenizer, ids) == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\n<|file_sep|>filename\n"
        "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>"
    )
    swapped = infill_prompt(tokenizer, "a", "b", suffix_first=True)
    assert shown(tokenizer, swapped).endswith("<|fim_suffix|>b<|fim_prefix|>a<|fim_middle|>")


@pytest.mark.parametrize("special", [CODE_LLAMA, DEEPSEEK])
def test_without_tokens_of_files(make: Make, special: list[str]) -> None:
    pre, mid, suf = special
    bos = [key("tokenizer.ggml.add_bos_token", BOOL, True), key("tokenizer.ggml.bos_token_id", U32, 0)]
    tokenizer = make(special, *bos)
    ids = infill_prompt(tokenizer, "a", "b", files={"x.py": "c"})
    assert shown(tokenizer, ids) == f"\n\n--- snippet ---\n\nc!{pre}a{suf}b{mid}"


def test_special_tokens_in_texts_are_plain(make: Make) -> None:
    tokenizer = make(QWEN)
    ids = infill_prompt(tokenizer, "<|fim_middle|>", "<|file_sep|>", files={"<|repo_name|>": "<|fim_pad|>"})
    special = [i for i in ids if tokenizer.is_special(i)]
    assert [shown(tokenizer, [i]) for i in special] == [
        "<|repo_name|>", "<|file_sep|>", "<|file_sep|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
    ]  # fmt: skip


def test_keys_of_the_file_name_them(make: Make) -> None:
    n = len(LETTERS)
    named = make([*QWEN, "<1>", "<2>"],
                 key("tokenizer.ggml.fim_pre_token_id", U32, n + 6),
                 key("tokenizer.ggml.suffix_token_id", U32, n + 7))  # fmt: skip
    assert (named.fim_ids["pre"], named.fim_ids["suf"]) == (n + 6, n + 7)
    assert named.fim_ids["mid"] == n + QWEN.index("<|fim_middle|>")


def test_a_vocabulary_without(make: Make) -> None:
    with pytest.raises(UnsupportedModel, match=r"no token for suf \(it has: mid, pre\)"):
        infill_prompt(make(QWEN[:2]), "a", "b")
    with pytest.raises(UnsupportedModel, match=r"pre, suf, mid \(it has: none\)"):
        infill_prompt(make([]), "a", "b")


def test_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vkbackend.models.engine.runner.runner", fake_runner.MODULE)
    tokens = ["<unk>", "<s>", "</s>", "a", "b", *QWEN[:3], "c", "\u2581"]
    tokens += [f"t{i}" for i in range(30)]
    extra = [
        array("tokenizer.ggml.scores", F32, [0.0] * len(tokens)),
        key("tokenizer.ggml.add_space_prefix", BOOL, False),
    ]
    types = [2, 3, 3, 1, 1, 3, 3, 3, *[1] * 32]
    (tmp_path / "m.gguf").write_bytes(vocabulary("llama", tokens, types=types, extra=extra))
    with LLM(tmp_path / "m.gguf", n_ctx=64) as llm:
        done = llm.infill("a", "b", 4, echo=True, temperature=0)
        assert done.text.startswith("<s><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>")
        assert len(done.tokens) == 4
        with pytest.raises(InvalidArgument, match=r"files"):
            llm.infill("a", "b", files=["c"])  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"suffix"):
            llm.infill("a", None)  # type: ignore[arg-type]
        with pytest.raises(UnknownArgument, match=r"suffix_first"):
            llm.infill("a", "b", sufix_first=True)  # type: ignore[call-arg]
