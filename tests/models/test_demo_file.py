"""gguf-py reads the committed demo model and float64 numpy runs it, without Vulkan and without vkbackend's
reader."""

import random
from importlib.resources import files
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from vkbackend.tools.demo.stories import tell_story
from vkbackend.tools.demo.vocabulary import BOS, EOS, N_SPECIAL, TEMPLATE, Vocabulary

PATH = Path(str(files("vkbackend.models"))) / "demo" / "demo.gguf"
HELD_OUT_SEED = 99_991
N_STORIES = 5
MAX_LOSS = 0.25
MIN_MARGIN = 0.02  # The smallest difference between the two largest logits (0.032 in the story).
GREEDY_STORY = (
    "Once upon a time, there was a kind little girl named Mia. She lived in a white house by the sea. "
    "One sunny morning, Mia found a small brass lantern under a bush. Then she went through the singing "
    "forest. By the old bridge, she met a small owl. It was growing dark, and the owl was afraid to "
    'walk home alone. "Please, can you help me?" asked the owl. "Do not worry," said Mia. "I have a '
    'small brass lantern!" Mia lit the lantern and held it high, and together they walked home along '
    'the bright path. "Thank you, Mia!" said the owl. "You are the kindest girl I have ever met." Then '
    "the owl gave her a soft feather, and they had tea together. From that day on, Mia and the owl were "
    "the best of friends."
)


@pytest.fixture(scope="module")
def reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(PATH)


@pytest.fixture(scope="module")
def meta(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {key: field.contents() for key, field in reader.fields.items()}


@pytest.fixture(scope="module")
def weights(reader: gguf.GGUFReader) -> dict[str, np.ndarray]:
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}


@pytest.fixture(scope="module")
def vocabulary(meta: dict[str, Any]) -> Vocabulary:
    return Vocabulary(meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.scores"])


def forward(w: dict[str, np.ndarray], meta: dict[str, Any], ids: list[int]) -> np.ndarray:
    """Return the logits [n, n_vocab] of all positions, computed at once. RoPE rotates adjacent pairs."""
    n_head, n_kv = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    eps, n = meta["llama.attention.layer_norm_rms_epsilon"], len(ids)
    half = meta["llama.rope.dimension_count"] // 2
    angle = np.outer(np.arange(n), meta["llama.rope.freq_base"] ** (-np.arange(half) / half))
    turn = np.exp(1j * angle)[:, None]  # [n, 1, half]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[name]

    def rope(x: np.ndarray) -> np.ndarray:
        return ((x[..., 0::2] + 1j * x[..., 1::2]) * turn).view(np.float64)

    h = w["token_embd.weight"][ids]
    for i in range(meta["llama.block_count"]):
        blk = f"blk.{i}."
        x = norm(h, blk + "attn_norm.weight")
        q = rope((x @ w[blk + "attn_q.weight"].T).reshape(n, n_head, -1))
        k = rope((x @ w[blk + "attn_k.weight"].T).reshape(n, n_kv, -1)).repeat(n_head // n_kv, axis=1)
        v = (x @ w[blk + "attn_v.weight"].T).reshape(n, n_kv, -1).repeat(n_head // n_kv, axis=1)
        score = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(2 * half)
        score = np.exp(np.where(np.tri(n, dtype=bool), score, -np.inf) - score.max(-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", score / score.sum(-1, keepdims=True), v)
        h = h + mixed.reshape(n, -1) @ w[blk + "attn_output.weight"].T
        x = norm(h, blk + "ffn_norm.weight")
        gate = x @ w[blk + "ffn_gate.weight"].T
        h = h + (gate / (1 + np.exp(-gate)) * (x @ w[blk + "ffn_up.weight"].T)) @ w[blk + "ffn_down.weight"].T
    return norm(h, "output_norm.weight") @ w["token_embd.weight"].T


def test_size_and_names(meta: dict[str, Any]) -> None:
    assert PATH.stat().st_size <= 2_000_000
    assert meta["general.architecture"] == "llama"
    assert meta["tokenizer.chat_template"] == TEMPLATE
    assert meta["general.name"] == "vkbackend demo" and meta["general.license"] == "MIT"
    assert meta["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0


def test_tensors(reader: gguf.GGUFReader, meta: dict[str, Any]) -> None:
    d, n_ff, n_vocab = (
        meta[f"llama.{key}"] for key in ("embedding_length", "feed_forward_length", "vocab_size")
    )
    kv = meta["llama.attention.head_count_kv"] * meta["llama.rope.dimension_count"]
    shapes = {"token_embd.weight": [d, n_vocab], "output_norm.weight": [d]}
    block = {"attn_norm": [d], "attn_q": [d, d], "attn_k": [d, kv], "attn_v": [d, kv], "attn_output": [d, d]}
    block |= {"ffn_norm": [d], "ffn_gate": [d, n_ff], "ffn_up": [d, n_ff], "ffn_down": [n_ff, d]}
    for i in range(meta["llama.block_count"]):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    assert {tensor.name: [int(n) for n in tensor.shape] for tensor in reader.tensors} == shapes
    for tensor in reader.tensors:
        quantized = len(tensor.shape) == 2
        assert tensor.tensor_type == (
            gguf.GGMLQuantizationType.Q8_0 if quantized else gguf.GGMLQuantizationType.F32
        )
    assert 0.8e6 < sum(int(tensor.n_elements) for tensor in reader.tensors) < 1.5e6


def test_splits_over_three_devices(meta: dict[str, Any]) -> None:
    n_kv = meta["llama.attention.head_count_kv"]
    group = meta["llama.attention.head_count"] // n_kv * meta["llama.rope.dimension_count"]
    assert n_kv % 3 == 0 and group % 32 == 0 and meta["llama.feed_forward_length"] % (3 * 32) == 0


def test_vocabulary(meta: dict[str, Any], vocabulary: Vocabulary) -> None:
    pieces, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    assert meta["tokenizer.ggml.model"] == "llama"
    assert len(pieces) == len(set(pieces)) == len(types) == len(vocabulary.scores) == meta["llama.vocab_size"]
    assert pieces[:3] == ["<unk>", "<s>", "</s>"]
    assert pieces[3:N_SPECIAL] == [f"<0x{byte:02X}>" for byte in range(256)]
    assert types[:3] == [2, 3, 3] and set(types[3:N_SPECIAL]) == {6} and set(types[N_SPECIAL:]) == {1}
    assert meta["tokenizer.ggml.bos_token_id"] == BOS and meta["tokenizer.ggml.eos_token_id"] == EOS
    assert meta["tokenizer.ggml.add_bos_token"] and meta["tokenizer.ggml.add_space_prefix"]
    text = 'Once upon a time, "Zoe" met 3 owls.'
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert [pieces[i] for i in vocabulary.encode("Once upon")] == ["\u2581Once", "\u2581upon"]


def test_the_weights_predict_the_stories(
    weights: dict[str, np.ndarray], meta: dict[str, Any], vocabulary: Vocabulary
) -> None:
    """Wrong layouts increase the loss: 3.8 nats if RoPE pairs the two halves of a head, and 0.27 nats if one
    layer's KV heads are reversed. The test also counts recalled words, at positions where the grammar allows
    no other word. A word counts if each of its tokens has the largest logit."""
    rng = random.Random(HELD_OUT_SEED)
    losses: list[float] = []
    recalled: list[bool] = []
    for _ in range(N_STORIES):
        story = tell_story(rng)
        ids = [BOS, *vocabulary.encode(story.text), EOS]
        logits = forward(weights, meta, ids[:-1])
        logits -= logits.max(-1, keepdims=True)
        losses += list(np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(ids) - 1), ids[1:]])
        hits = logits.argmax(-1) == ids[1:]
        for before, word in (
            ("At first", story.hero),
            ("That night,", story.hero),
            ("And whenever", story.hero),
            ("remembered the", story.thing),
        ):
            at = story.text.find(f"{before} {word}")
            if at >= 0:
                begin = len(vocabulary.encode(story.text[:at] + before))
                end = begin + len(vocabulary.encode(word))
                assert vocabulary.decode(ids[begin + 1 : end + 1]) == word
                recalled.append(bool(hits[begin:end].all()))
    assert np.mean(losses) < MAX_LOSS
    assert len(recalled) >= N_STORIES // 2 and np.mean(recalled) >= 0.9


def test_greedy_story_has_margins(
    weights: dict[str, np.ndarray], meta: dict[str, Any], vocabulary: Vocabulary
) -> None:
    ids = [BOS, *vocabulary.encode(GREEDY_STORY), EOS]
    n_prompt = 1 + len(vocabulary.encode("Once upon a time"))
    logits = forward(weights, meta, ids[:-1])[n_prompt - 1 :]
    assert logits.argmax(-1).tolist() == ids[n_prompt:]
    second, best = np.sort(logits, axis=-1)[:, -2:].T
    assert (best - second).min() >= MIN_MARGIN
