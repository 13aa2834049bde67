"""The texts of tokens determine their roles: end tokens, gpt-oss's channels, white space after Phi-3's
markers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from gguf_files import F32, STRING, U32, array, key, vocabulary

from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.tokenizer import Tokenizer

pytestmark = pytest.mark.no_vulkan

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
SPACE = "\u2581"
BYTES = [f"<0x{b:02X}>" for b in range(256)]
BYTE_LETTERS = [chr(b) for b in range(0x21, 0x7F)] + ["\u0120", "\u010a"]

Make = Callable[..., Tokenizer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(
        special: Sequence[str], kind: int = CONTROL, extra: Sequence[bytes] = (), pre: str = "gpt-2"
    ) -> Tokenizer:
        types = [NORMAL] * len(BYTE_LETTERS) + [kind] * len(special)
        keys = [array("tokenizer.ggml.merges", STRING, []), key("tokenizer.ggml.pre", STRING, pre), *extra]
        path = tmp_path / "v.gguf"
        path.write_bytes(vocabulary("gpt2", [*BYTE_LETTERS, *special], types=types, extra=keys))
        with GGUF.open(path) as gguf:
            return Tokenizer.from_gguf(gguf)

    return build


def ends(tokenizer: Tokenizer) -> set[str]:
    return {tokenizer.piece(i).decode() for i in tokenizer.stop_ids}


def test_channel_markers_of_gpt_oss_are_text(make: Make) -> None:
    """Without the text of these control tokens, a stream could not be divided into channels."""
    markers = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"]
    tokenizer = make([*markers, "<|return|>", "<|call|>"])
    said = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    ids = tokenizer.encode(said + "<|return|>", parse_special=True)
    assert len(ids) < len(said) and tokenizer.decode(ids) == said
    assert ends(tokenizer) == {"<|return|>", "<|call|>"}  # <|end|> ends a message
    assert all(tokenizer.is_marker(ids[i]) for i in (0, -1))


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (["<|end|>", "<|flush|>", "<|calls|>", "<|im_end|>"], {"<|flush|>", "<|calls|>", "<|im_end|>"}),
        (["<|end|>", "<|endoftext|>"], {"<|end|>", "<|endoftext|>"}),  # tokens of Phi-3.
        (["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_middle|>", "<|im_end|>"],
         {"<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|im_end|>"}),  # Tokens of Qwen2.
        (["<fim_pad>", "<reponame>", "<fim_prefix>", "<|end_of_text|>"],
         {"<fim_pad>", "<reponame>", "<|end_of_text|>"}),  # Tokens of Granite.
        (["<PAD>", "<EOS_TOKEN>"], {"<PAD>"}),  # Tokens of Command R.
        (["[e~[", "]~b]"], {"[e~["}),  # Tokens of MiniMax.
        (["[PAD]", "[EOS]", "[EOT]"], {"[PAD]", "[EOS]", "[EOT]"}),  # Tokens of Kimi K2.
        (["<|tool_response>", "<turn|>", "</s>"], {"<|tool_response>", "<turn|>"}),  # Tokens of Gemma 4.
        (["<fim-pad>", "<|fim_pad|>"], {"<|fim_pad|>"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_ends_of_a_generation(make: Make, special: list[str], expected: set[str]) -> None:
    for kind in (CONTROL, NORMAL):
        tokenizer = make(special, kind)
        assert ends(tokenizer) == expected
        assert all(tokenizer.is_special(i) for i in tokenizer.stop_ids)


def test_a_key_can_name_an_end_token_of_any_text(make: Make) -> None:
    n = len(BYTE_LETTERS)
    tokenizer = make(["<pad here>", "<|fim_pad|>"], extra=[key("tokenizer.ggml.fim_pad_token_id", U32, n)])
    assert tokenizer.stop_ids == {n}


def test_parts_of_a_file_to_fill_are_control_tokens(make: Make) -> None:
    tokenizer = make(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], NORMAL)
    text = "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    assert len(tokenizer.encode(text, parse_special=True)) == 5 and len(tokenizer.encode(text)) == len(text)


def spm(tmp_path: Path, name: str) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "<|endoftext|>", *BYTES, SPACE, f"{SPACE}a"]
    types = [2, *[CONTROL] * 5, *[BYTE] * 256, NORMAL, NORMAL]
    scores = array("tokenizer.ggml.scores", F32, [0.0] * len(tokens))
    path = tmp_path / "v.gguf"
    extra = [scores, key("general.name", STRING, name)]
    path.write_bytes(vocabulary("llama", tokens, types=types, extra=extra))
    with GGUF.open(path) as gguf:
        return Tokenizer.from_gguf(gguf)


def test_white_space_after_the_special_tokens_of_phi_3(tmp_path: Path) -> None:
    text = "<|user|>\n a<|end|>\n<|user|> \t\r\v\f<|endoftext|>\na<s> a"
    user, end, endoftext, a, line, space = 3, 4, 5, 263, 6 + 10, 262
    phi = spm(tmp_path, "Phi-3 Mini").encode(text, add_special=False, parse_special=True)
    b = 6 + ord("a")
    assert phi == [user, a, end, user, endoftext, space, line, b, 1, space, a]
    other = spm(tmp_path, "Llama").encode(text, add_special=False, parse_special=True)
    assert other[:5] == [user, space, line, a, end] and len(other) > len(phi) + 5
