"""Uses libmtmd, llama.cpp's encoder of pictures, as an oracle. ctypes calls the C library in `xllamacpp`.
libmtmd runs on the CPU. The text model is a file with only a vocabulary.
"""

from __future__ import annotations

import ctypes
import tempfile
from ctypes import POINTER, byref, c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_void_p
from functools import cache
from math import isqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from oracles import llama_cpp
from oracles.fixture import Fixture, write
from oracles.vision import TEXT_WIDTH, pixels_of, size

MARKS = {
    "idefics3": ("<fake_token_around_image>", "<global-img>", "<row_1_col_1>"),
    "gemma3": ("<start_of_image>", "<end_of_image>"),
    "qwen2vl": ("<|vision_start|>", "<|vision_end|>"),
    "qwen2.5vl": ("<|vision_start|>", "<|vision_end|>"),
    "qwen3vl": ("<|vision_start|>", "<|vision_end|>"),
    "pixtral": ("[IMG_BREAK]", "[IMG_END]"),
    "pixtral+merger": ("[IMG_BREAK]", "[IMG_END]"),
    "gemma4uv": ("<|image>", "<image|>"),
    "lfm2": ("<|image_start|>", "<|image_end|>"),
    "llama4": ("<|image_start|>", "<|image_end|>"),
    "glm4v": ("<|begin_of_image|>", "<|end_of_image|>"),
    "kimik25": ("<|media_begin|>", "<|media_end|>"),
}
M_ROPE = {"rope.dimension_sections": [4, 2, 2, 0]}
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "idefics3": ("llama", {}),
    "gemma3": ("gemma3", {"attention.sliding_window": 32}),
    "gemma4uv": ("gemma4", {"attention.sliding_window": 32}),
    "qwen2vl": ("qwen2vl", M_ROPE),
    "qwen2.5vl": ("qwen2vl", M_ROPE),
    "qwen3vl": ("qwen3vl", {**M_ROPE, "n_deepstack_layers": 2}),
    "pixtral": ("llama", {}),
    "pixtral+merger": ("llama", {}),
    "lfm2": ("llama", {}),
    "llama4": ("llama", {}),
    "glm4v": ("qwen2vl", M_ROPE),
    "kimik25": ("llama", {}),
}


class _Parameters(ctypes.Structure):
    _fields_ = (
        ("use_gpu", c_bool),
        ("device", c_void_p),
        ("print_timings", c_bool),
        ("n_threads", c_int),
        ("image_marker", c_char_p),
        ("media_marker", c_char_p),
        ("flash_attn_type", c_int),
        ("warmup", c_bool),
        ("image_min_tokens", c_int),
        ("image_max_tokens", c_int),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("batch_max_tokens", c_int32),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
    )


class _Text(ctypes.Structure):
    _fields_ = (
        ("text", c_char_p),
        ("text_len", c_size_t),
        ("add_special", c_bool),
        ("parse_special", c_bool),
    )


@cache
def _library() -> Any:
    lib = llama_cpp.library()
    lib.mtmd_context_params_default.restype = _Parameters
    lib.mtmd_init_from_file.argtypes = [c_char_p, c_void_p, _Parameters]
    lib.mtmd_bitmap_init.argtypes = [ctypes.c_uint32, ctypes.c_uint32, c_char_p]
    lib.mtmd_tokenize.argtypes = [c_void_p, c_void_p, POINTER(_Text), POINTER(c_void_p), c_size_t]
    lib.mtmd_input_chunks_get.argtypes = [c_void_p, c_size_t]
    lib.mtmd_encode_chunk.argtypes = [c_void_p, c_void_p]
    lib.mtmd_get_output_embd.argtypes, lib.mtmd_get_output_embd.restype = [c_void_p], POINTER(c_float)
    for name in (
        "mtmd_init_from_file",
        "mtmd_bitmap_init",
        "mtmd_input_chunks_init",
        "mtmd_input_chunks_get",
    ):
        getattr(lib, name).restype = c_void_p
    for name in ("mtmd_input_chunks_size", "mtmd_input_chunk_get_n_tokens"):
        getattr(lib, name).argtypes, getattr(lib, name).restype = [c_void_p], c_size_t
    lib.mtmd_input_chunk_get_type.argtypes = [c_void_p]
    lib.mtmd_default_marker.restype = c_char_p
    return lib


def write_vocabulary(name: str, path: Path) -> Path:
    """Write a text model without tensors. Its vocabulary has byte tokens and the family's special tokens."""
    arch, keys = TEXTS[name]
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in visible]
    as_text = {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokens = [as_text[b] for b in range(256)] + [as_text[10] * 2, "<|endoftext|>", *MARKS[name]]
    writer = gguf.GGUFWriter(path, arch)
    sizes = {
        "context_length": 64, "embedding_length": TEXT_WIDTH, "block_count": 1, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 4, "attention.key_length": 16,
        "attention.value_length": 16, "rope.dimension_count": 16,
    }  # fmt: skip
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    for key, value in {**sizes, **keys}.items():
        if isinstance(value, int):
            writer.add_uint32(f"{arch}.{key}", value)
        else:
            writer.add_array(f"{arch}.{key}", value)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "qwen2")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [1] * 257 + [3] * (len(tokens) - 257))
    writer.add_array("tokenizer.ggml.merges", [f"{as_text[10]} {as_text[10]}"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 257)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def rows(fixture: Fixture) -> np.ndarray:
    """Return the rows of the fixture's picture, f32 [n_rows, width], or of its last tile."""
    lib, name = _library(), fixture.name
    side = size(fixture, "patch_size") * (3 if name == "gemma4uv" else 1)
    pixels = np.rint((pixels_of(name, side) + 1) * 127.5).astype(np.uint8)
    n_deep = sum(fixture.keys.get("vision.is_deepstack_layers", []))
    with tempfile.TemporaryDirectory() as folder:
        text = llama_cpp.Vocabulary(write_vocabulary(name, Path(folder) / "text.gguf")).model
        parameters = lib.mtmd_context_params_default()
        assert parameters.media_marker == lib.mtmd_default_marker(), "the parameters of libmtmd changed"
        parameters.use_gpu = parameters.print_timings = parameters.warmup = False
        parameters.n_threads, parameters.flash_attn_type = 1, 0
        if name.startswith(("qwen", "pixtral", "gemma4", "lfm2", "glm4v", "kimi")):
            parameters.image_min_tokens = 1
        path = write(fixture, Path(folder) / "mmproj.gguf")
        context = lib.mtmd_init_from_file(str(path).encode(), text, parameters)
        assert context, f"libmtmd does not open {name}"
        bitmap = lib.mtmd_bitmap_init(pixels.shape[1], pixels.shape[0], pixels.tobytes())
        marker = lib.mtmd_default_marker()
        chunks, prompt = lib.mtmd_input_chunks_init(), _Text(marker, len(marker), False, True)
        assert lib.mtmd_tokenize(context, chunks, byref(prompt), (c_void_p * 1)(bitmap), 1) == 0
        result = np.empty((0, 0), np.float32)
        for i in range(lib.mtmd_input_chunks_size(chunks)):
            chunk = lib.mtmd_input_chunks_get(chunks, i)
            if lib.mtmd_input_chunk_get_type(chunk) == 1:
                assert lib.mtmd_encode_chunk(context, chunk) == 0
                shape = lib.mtmd_input_chunk_get_n_tokens(chunk), TEXT_WIDTH * (1 + n_deep)
                embeddings = lib.mtmd_get_output_embd(context)
                result = np.ctypeslib.as_array(embeddings, (shape[0] * shape[1],)).reshape(shape).copy()
        if name == "llama4":  # libmtmd returns the rows of a tile by columns.
            side = isqrt(len(result))
            result = result.reshape(side, side, -1).swapaxes(0, 1).reshape(result.shape)
        return result
