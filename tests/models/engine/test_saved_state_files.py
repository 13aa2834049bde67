from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.states import States
from hypothesis import given, settings
from hypothesis import strategies as st
from prefills import prefill
from random_cases import examples
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from state_models import PROMPT, TOKENS, model, open_llm, open_runner

from vkbackend.errors import InvalidArgument, StateError, VkbackendError
from vkbackend.meta.gather import gather_rows
from vkbackend.models.engine.cache.blocks import SlotContent
from vkbackend.models.engine.runner import saved_state, state_checksums
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.gguf.fingerprint import fingerprint
from vkbackend.models.gguf.reader import GGUF

# ---- files that do not fit ----


@pytest.fixture(scope="module")
def saved(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "a.safetensors"
    with open_llm(models) as llm:
        llm.generate(TOKENS[:20], 5, temperature=0, slot=0)
        llm.save_state(path)
    return path


@pytest.fixture(scope="module")
def held(models: Path) -> Iterator[tuple[Runner, SlotContent]]:
    runner = open_runner(models, ["numpy"], n_ctx=32)
    prefill(runner, TOKENS[20:40])
    yield runner, SlotContent(TOKENS[20:40], 20)
    runner.close()


def refuses(held: tuple[Runner, SlotContent], path: Path, match: str | None = None) -> None:
    runner, content = held
    before = SlotContent(list(content.tokens), content.n_stored)
    caches = [gather_rows(runner.mesh.devices, layer.k, 0, 32) for layer in runner.kv.layers]
    with pytest.raises(StateError, match=match):
        saved_state.load(runner, path, 0, content)
    assert content == before
    for layer, cache in zip(runner.kv.layers, caches, strict=True):
        assert np.array_equal(gather_rows(runner.mesh.devices, layer.k, 0, 32), cache)


def test_another_model_cache_or_context(models: Path, saved: Path) -> None:
    for options, match in (
        ({"name": "stories-narrow-F32"}, "model_sha256 .* open the model it was saved with"),
        ({"type_k": "f16"}, "type_k 'f32', here it is 'f16'; open the same cache types"),
        ({"type_v": "f16"}, "type_v 'f32'"),
        ({"n_ctx": 23}, "holds positions up to 24 and the context 23; .* at least 24"),
    ):
        with open_llm(models, **options) as llm, pytest.raises(StateError, match=match):
            llm.load_state(saved)


def test_fingerprints(models: Path, tmp_path: Path) -> None:
    source, copy = model(models, "stories-narrow-F32"), tmp_path / "copy.gguf"
    raw = source.read_bytes()

    def mark(content: bytes) -> str:
        copy.write_bytes(content)
        with GGUF.open(copy) as gguf:
            return fingerprint(gguf)

    with GGUF.open(source) as gguf:
        assert fingerprint(gguf) == mark(raw)
        places = [gguf.tensors[name].offset for name in ("token_embd.weight", "blk.3.ffn_up.weight")]
    key = b"llama.attention.layer_norm_rms_epsilon"
    for at in (*places, raw.index(key) + len(key) + 4):  # a 4-byte type follows the key
        assert mark(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]) != mark(raw)


def rewritten(saved: Path, path: Path, metadata: dict[str, str] | None = None, **tensors: Any) -> Path:
    """Write `saved` to `path` with changes to its metadata and tensors. None removes an entry."""
    with safe_open(saved, "numpy") as file:
        meta = {k: v for k, v in (file.metadata() | (metadata or {})).items() if v is not None}
    entries = {k: v for k, v in (load_file(saved) | tensors).items() if v is not None}
    save_file(entries, path, meta)
    return path


@pytest.mark.parametrize(
    ("metadata", "tensors", "match"),
    [
        ({"format": "other"}, {}, "format 'other' version '1': expected vkbackend.state version 1"),
        ({"version": "2"}, {}, "version '2'"),
        ({"first": "-1"}, {}, "first is '-1', expected a position"),
        ({"last": "9" * 5000}, {}, "last is '999"),
        ({"last": "\u0662\u0664"}, {}, "expected a position"),
        ({"last": "0"}, {}, r"positions 0\.\.0 are not a range"),
        ({"resumable": "99"}, {}, "resumable is 99, beyond the last position"),
        ({"last": "25"}, {}, "tokens is I32|cache_k_l0 is F32"),
        ({"first": "4"}, {}, "first 4 tokens, and these are not what the slot"),
        ({"last": None}, {}, "last is ''"),
        ({"prefix_sha256": "0"}, {}, "not what the slot"),
        ({}, {"tokens": None}, "missing or not known: 'tokens'"),
        ({}, {"cache_v_l4": None}, "'cache_v_l4'"),
        ({}, {"cache_v_l5": np.zeros(1)}, "'cache_v_l5'"),
        ({}, {"tokens": np.zeros(23, np.int32)}, r"tokens is I32 \[23\], expected I32 \[24\]"),
        ({}, {"tokens": np.zeros((), np.int32)}, r"tokens is I32 \[\]"),
        ({}, {"tokens": np.zeros(24, np.float32)}, "tokens is F32"),
        ({}, {"tokens": np.full(24, 512, np.int32)}, r"token id 512 is out of range: the model has 0\.\.511"),
        ({}, {"tokens": np.full(24, -1, np.int32)}, "token id -1"),
        ({}, {"cache_k_l0": np.zeros((24, 8, 4), np.float32)}, r"cache_k_l0 is F32 \[24, 8, 4\]"),
        ({}, {"cache_k_l0": np.zeros((24, 4, 8), np.float16)}, "cache_k_l0 is F16"),
    ],
)
def test_files_with_wrong_metadata(
    saved: Path, tmp_path: Path, held: Any, metadata: Any, tensors: Any, match: str
) -> None:
    refuses(held, rewritten(saved, tmp_path / "b", metadata, **tensors), match)


# ---- checksums ----


def test_exchanged_tensors(saved: Path, tmp_path: Path, held: Any) -> None:
    """The data of two tensors is swapped. Their names, types and shapes do not change."""
    stored, path = load_file(saved), tmp_path / "b"
    k0, v0, k1 = (stored[name] for name in ("cache_k_l0", "cache_v_l0", "cache_k_l1"))
    refuses(
        held, rewritten(saved, path, cache_k_l0=k1, cache_k_l1=k0), "cache_k_l0 does not match its checks"
    )
    refuses(
        held, rewritten(saved, path, cache_k_l0=v0, cache_v_l0=k0), "cache_k_l0 does not match its checks"
    )
    rows = k1[[1, 0, *range(2, len(k1))]]
    refuses(held, rewritten(saved, path, cache_k_l1=rows), "cache_k_l1 does not match its checksum")
    heads = k1[:, [1, 0, 2, 3]]
    refuses(held, rewritten(saved, path, cache_k_l1=heads), "cache_k_l1 does not match its checksum")
    tokens = stored["tokens"][::-1].copy()
    refuses(held, rewritten(saved, path, tokens=tokens), "tokens does not match its checksum")


def test_tensors_exchanged_with_their_checksums(saved: Path, tmp_path: Path, held: Any) -> None:
    stored = load_file(saved)
    with safe_open(saved, "numpy") as file:
        meta = file.metadata()
    two = "cache_k_l0", "cache_k_l1"
    sums = {f"sha256_{a}": meta[f"sha256_{b}"] for a, b in (two, two[::-1])}
    tensors = {a: stored[b] for a, b in (two, two[::-1])}
    refuses(held, rewritten(saved, tmp_path / "b", sums, **tensors), "cache_k_l0 does not match its checksum")


def test_a_tensor_of_another_state(models: Path, saved: Path, tmp_path: Path, held: Any) -> None:
    """A tensor and its valid checksum come from another state of the same model and positions."""
    with open_llm(models) as llm:
        llm.generate(TOKENS[:22], 4, temperature=0, slot=0)
        llm.save_state(tmp_path / "longer")
    with safe_open(tmp_path / "longer", "numpy") as file:
        there = {"sha256_cache_v_l2": file.metadata()["sha256_cache_v_l2"]}
        tensor = file.get_tensor("cache_v_l2")[:24]
    refuses(held, rewritten(saved, tmp_path / "b", there, cache_v_l2=tensor), "cache_v_l2 does not match")


def test_metadata_of_another_state(saved: Path, tmp_path: Path, held: Any) -> None:
    """A checksum covers the metadata, so changes to valid values are refused too."""
    refuses(held, rewritten(saved, tmp_path / "b", {"resumable": "3"}), "does not match its checksum")
    refuses(held, rewritten(saved, tmp_path / "b", {"comment": "mine"}), "does not match its checksum")


@pytest.mark.parametrize("kept", ["sha256_tokens", "sha256_nothing"])
def test_missing_checksums(saved: Path, tmp_path: Path, held: Any, kept: str) -> None:
    """A file must contain all checksums or none. A tensor without a checksum could have any content."""
    with safe_open(saved, "numpy") as file:
        sums = [key for key in file.metadata() if key.startswith("sha256_")]
    assert len(sums) == 11
    gone: Any = dict.fromkeys(sums[:-1])
    refuses(held, rewritten(saved, tmp_path / "b", gone), "and its checksum are not both there")
    refuses(held, rewritten(saved, tmp_path / "b", gone | {sums[-1]: None, kept: "0"}), "not both there")


def test_a_flipped_byte_of_the_tensors(saved: Path, held: Any) -> None:
    raw, path = saved.read_bytes(), saved.with_name("flipped")
    begin = 8 + struct.unpack("<Q", raw[:8])[0]
    for at in (begin, begin + 1, *range(begin + 7, len(raw), 1009), len(raw) - 1):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        refuses(held, path, "does not match its checksum|token id")


def test_files_without_checksums(
    models: Path, saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with safe_open(saved, "numpy") as file:
        old: Any = dict.fromkeys(key for key in file.metadata() if key.startswith("sha256_"))
    path = rewritten(saved, tmp_path / "old", old)
    with open_llm(models) as llm:
        tokens = llm.load_state(saved)
        assert capfd.readouterr().err == ""
        assert llm.load_state(path) == tokens
        assert f"vkbackend: '{path}': saved without checksums" in capfd.readouterr().err
        assert llm.generate(tokens, 3, slot=0).timings["prompt_n"] == 1


def test_checksums_of_pieces(
    models: Path, saved: Path, tmp_path: Path, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner(models, ["numpy"])
    for nbytes in (1, 256, 1000):
        monkeypatch.setattr(state_checksums, "PIECE_NBYTES", nbytes)
        saved_state.load(runner, saved, 0, SlotContent())
        stored = load_file(saved)
        stored["cache_v_l4"][-1, -1, -1] += 1
        last = rewritten(saved, tmp_path / "b", cache_v_l4=stored["cache_v_l4"])
        refuses(held, last, "cache_v_l4 does not match its checksum")
    runner.close()


# ---- wrong files ----


def test_truncated_anywhere(saved: Path, tmp_path: Path, held: Any) -> None:
    raw, path = saved.read_bytes(), tmp_path / "b"
    header = struct.unpack("<Q", raw[:8])[0]
    for n in (0, 1, 7, 8, 9, 100, 8 + header - 1, 8 + header, 8 + header + 1, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:n])
        refuses(held, path)
    path.write_bytes(raw + b"\0")
    refuses(held, path)


def test_malicious_headers(saved: Path, tmp_path: Path, held: Any) -> None:
    path = tmp_path / "b"

    def with_header(header: bytes, n: int | None = None) -> None:
        path.write_bytes(struct.pack("<Q", len(header) if n is None else n) + header + bytes(100))
        refuses(held, path)

    for n in (0, 1, 1 << 20, (1 << 20) + 1, 1 << 40, (1 << 64) - 1):
        with_header(b"{}", n)
    with_header(b"{}" + b" " * (1 << 21))  # longer than the limit
    with_header(b"[" * 200_000)
    with_header(b'{"__metadata__":{"format":"vkbackend.state","version":"1"}')
    for offsets in ([0, 1 << 62], [-1, 5], [100, 0], [0, 50]):
        entry = {"dtype": "F32", "shape": [1 << 60], "data_offsets": offsets}
        with_header(json.dumps({"tokens": entry}).encode())


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[States]:
    states = States(tmp_path_factory.mktemp("states"))
    yield states
    states.close()


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 1 << 32))
def test_random_damage_is_refused_or_changes_nothing(states: States, seed: int) -> None:
    assert states.check(states.make(random.Random(seed))) in ("accepted", "refused")


def test_paths_that_are_not_files(tmp_path: Path, held: Any) -> None:
    refuses(held, tmp_path / "missing", "cannot be read")
    refuses(held, tmp_path, "not a regular file")
    refuses(held, Path("a\0b"), "cannot be read")


def test_a_pipe_is_refused(tmp_path: Path, held: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    refuses(held, tmp_path / "pipe", "not a regular file")


# ---- a save is complete or writes nothing ----


def test_a_failed_save_keeps_the_previous_file(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    with open_llm(models) as llm:
        llm.generate(PROMPT, 3, slot=0)
        path.write_bytes(b"old")

        def full_disk(tensors: Any, filename: Path, metadata: Any) -> None:
            filename.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(saved_state, "save_file", full_disk)
            with pytest.raises(StateError, match="cannot be written: No space left on device"):
                llm.save_state(path)
        assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["a"]
        link = tmp_path / "link"
        link.symlink_to(path)
        llm.save_state(link)
        assert link.is_symlink() and llm.load_state(path)[:5] == PROMPT
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "link"]
        for bad in (tmp_path, "/dev/null", tmp_path / "no" / "a", "a\0b", b"x" * 300):
            with pytest.raises(VkbackendError):
                llm.save_state(bad)  # type: ignore[arg-type]
        assert not Path("/dev/null").is_file()
        with pytest.raises(InvalidArgument, match="path=3"):
            llm.save_state(3)  # type: ignore[arg-type]


def test_a_device_that_fails_in_the_middle(
    models: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If loading fails, the slot still holds the positions before the range."""
    runner = open_runner(models, ["numpy"])
    calls = 0

    def fails(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise VkbackendError("broken")

    monkeypatch.setattr(saved_state, "scatter_rows", fails)
    content = SlotContent(TOKENS[20:40], 20)
    with pytest.raises(VkbackendError, match="broken"):
        saved_state.load(runner, saved, 0, content)
    assert content == SlotContent([], 0)
    runner.close()
