"""Makes a file as llama.cpp's test-llama-archs does. The file has every key that llama.cpp knows, and random
tensors whose names come from llama.cpp. Then removes keys and tensors that real files lack, and computes
llama.cpp's logits.

    PYTHONPATH=tests/support python tests/support/oracles/llama_archs.py ARCHITECTURE FILE.gguf

Needs xllamacpp. Writes FILE.gguf and FILE.npz. llama.cpp may abort, so a process makes one file.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
from oracles import llama_cpp

N_VOCAB, N_CTX = 128, 256
TOKENS = np.random.default_rng(5).integers(0, N_VOCAB, 40).tolist()
LATENT = {
    "bailingmoe3", "deepseek2", "deepseek32", "glm-dsa", "glm5-next", "hy_v4", "kimi-k3",
    "kimi-linear", "mistral4",
}  # fmt: skip
RECURRENT = {  # in these models the second layer has no heads
    "bailingmoe3", "glm5-next", "granitehybrid", "jamba", "kimi-k3", "kimi-linear", "lfm2", "lfm2moe",
    "nemotron_h", "nemotron_h_moe",
}  # fmt: skip
# llama.cpp does not save these models, or omits keys. Their files have only the keys below.
NOT_SAVED = {"apertus", "bitnet", "gemma3n", "gemma4", "step35"}
READS_FACTORS = {"gemma4"}
WINDOWS_BY_LAYER = {"cohere2moe", "gemma4", "granite_swa", "mimo2", "muse-glimmer", "step35"}
SIZES = {  # (columns of the residual, heads, kv heads, FFN columns, layers)
    "afmoe": (256, 4, 2, 384, 2),
    "deepseek4": (256, 8, 1, 384, 2),
    "gemma3n": (64, 1, 1, 96, 22),
    "gemma4": (128, 2, 2, 192, 5),
    "laguna": (160, 2, 2, 384, 2),
    "llama4": (256, 2, 2, 384, 4),
    "muse-glimmer": (256, 4, 2, 384, 2),
    "nemotron_h": (256, 2, 2, 384, 3),
    "nemotron_h_moe": (256, 2, 2, 384, 3),
    "qwen3": (256, 4, 1, 384, 2),
    "step35": (160, 2, 2, 384, 2),
    **dict.fromkeys(LATENT, (128, 1, 1, 192, 2)),
}
# Regular expressions for keys and tensors that real files lack. Most scales belong to NVFP4. Saved files also
# contain keys of other architectures, with values that disable them.
SCALES, ROPE_FACTORS = r"^(blk\..*|output)\.(input_)?scale$", r"^rope_(freqs|factors)"
SCALES_BUT_EXPERTS = r"^blk\..*\.input_scale$|^blk\..*(?<!ffn_gate_inp)(?<!ffn_down_exps)\.scale$"
OFF = r"clamp_kqv|max_alibi_bias|\.logit_scale|q_lora_rank|kv_lora_rank|indexer|residual_scale"
# llama.cpp does not add these biases, and does not read the norm
QKV_BIAS, UNREAD_NORM = r"attn_[qkv]\.bias", r"expert_weights_norm"
WINDOW = r"sliding_window"
# experts in a layer that is dense according to the keys
DENSE_FIRST = r"blk\.0\..*(_exps|_shexp|ffn_gate_inp|exp_probs_b)"
DENSE_SECOND = r"blk\.1\.ffn_(gate|up|down)\.weight"  # a dense FFN in a layer with experts
UNREAL = {
    "qwen3next": r"blk\.0\.attn_(gate|qkv)\.weight",
    "gemma4": r"expert_shared",
    "glm-dsa": r"indexer\.types",
    "granite_swa": r"deepstack|rope\.scaling\.finetuned|rope_pattern",
    "minicpm3": r"rope\.scaling\.finetuned|length_mla",
    "llama4": rf"temperature_|{WINDOW}",
    "apertus": rf"{WINDOW}|_norm\.bias",
    "bitnet": WINDOW,
    "mimo2": rf"{DENSE_FIRST}|{DENSE_SECOND}|value_scale|{QKV_BIAS}|{UNREAD_NORM}",
    "hy_v3": rf"{DENSE_FIRST}|{DENSE_SECOND}",
    "step35": rf"{DENSE_FIRST}|{DENSE_SECOND}",
    "ernie4_5": r"\.bias$|expert_",
    "ernie4_5-moe": r"\.bias$",
    "exaone4": WINDOW,
    "falcon-h1": r"attn_\w+\.bias|ffn_\w+\.bias",
    "granitemoe": r"rope\.scaling\.finetuned",
    "kimi-k3": QKV_BIAS,
    "kimi-linear": f"{QKV_BIAS}|{UNREAD_NORM}",
    "bailingmoe3": QKV_BIAS,
    "lfm2": WINDOW,
    "lfm2moe": f"{WINDOW}|{UNREAD_NORM}",
    "minimax-m2": UNREAD_NORM,
    "nemotron_h_moe": r"latent",
    "mpt": r"attn_[qk]_norm|position_embd|\.act\.",
    "qwen2vl": r"^output\.bias",
    "qwen4exp": QKV_BIAS,
    "refact": r"\.bias$",
    "smallthinker": UNREAD_NORM,
    "stablelm": r"attn_[qk]_norm",
}


class _Tensor(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


_SET = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Tensor), ctypes.c_void_p)


def keys(arch: str, has_experts: bool) -> dict[str, Any]:
    n_embd, n_head, n_kv, n_ff, n_layer = SIZES.get(arch, (256, 2, 2, 384, 2))
    size = n_embd // n_head
    heads: dict[str, Any] = {"attention.head_count": n_head, "attention.head_count_kv": n_kv}
    if arch in RECURRENT:
        heads = {key: [0 if il == 1 else n_head for il in range(n_layer)] for key in heads}
    feeds_by_layer = arch.startswith("nemotron_h")
    if feeds_by_layer:  # a layer has attention, a scan or an FFN
        heads = {key: [n_head, 0, 0] for key in heads}
    values = {
        "vocab_size": N_VOCAB, "context_length": N_CTX, "embedding_length": n_embd,
        "block_count": n_layer, "leading_dense_block_count": 1,
        "feed_forward_length": [0 if il <= 1 else n_ff for il in range(n_layer)] if feeds_by_layer else n_ff,
        "use_parallel_residual": False, "logit_scale": 1.0, "time_mix_extra_dim": 64,
        "time_decay_extra_dim": 128, "full_attention_interval": 2, **heads, "attention.max_alibi_bias": 8.0,
        "attention.clamp_kqv": 1.0, "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.group_norm_epsilon": 1e-5,
        "attention.group_norm_groups": 8, "attention.q_lora_rank": 512, "attention.kv_lora_rank": 512,
        "attention.relative_buckets_count": 8, "attention.sliding_window": N_CTX // 8,
        "attention.sliding_window_pattern": [il % 2 for il in range(n_layer)]
        if arch in WINDOWS_BY_LAYER
        else 2,
        "attention.indexer.head_count": 64, "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 131072, "attention.indexer.block_size": 4,
        "attention.indexer.local_blocks": 1,
        "rope.dimension_sections": [8, 12, 12, 0] if arch == "bailingmoe3" else [size // 4] * 4,
        "ssm.inner_size": 256 if arch in ("qwen3next", "qwen35", "qwen35moe", "qwen4exp") else 2 * n_embd,
        "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.time_step_rank": n_head, "ssm.group_count": 2,
        "kda.head_dim": 128, "kda.safe_gate": True, "kda.gate_lower_bound": -5.0, "wkv.head_size": size,
        "shortconv.l_cache": 3, "residual_scale": 3.5565588200778455, "attn_res.block_size": 12,
        "activation.situ_beta": 4.0, "activation.situ_linear_beta": 25.0, "token_shift_count": 2,
    }  # fmt: skip
    for name in ("decay", "iclr", "value_residual_mix", "gate"):
        values[f"attention.{name}_lora_rank"] = 32
    if arch in LATENT:
        values |= {
            "attention.key_length": 576, "attention.value_length": 512, "rope.dimension_count": 64,
            "attention.key_length_mla": 192, "attention.value_length_mla": 128,
        }  # fmt: skip
    if has_experts:
        values |= {
            "expert_feed_forward_length": n_ff, "expert_shared_feed_forward_length": n_ff // 2,
            "expert_latent_length": n_ff, "interleave_moe_layer_step": 2, "expert_count": 2,
            "expert_used_count": 2, "expert_shared_count": 1, "expert_gating_func": 2,
            "expert_group_scale": 1.0, "experts_per_group": 1,
        }  # fmt: skip
    return values | _own(arch, n_embd, size, n_layer)


def _own(arch: str, n_embd: int, size: int, n_layer: int) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        "bailingmoe3": {"swiglu_clamp_exp": [0.0, 4.0], "swiglu_clamp_shexp": [0.0, 5.0]},
        "gemma3n": {
            "embedding_length_per_layer_input": 256, "altup.num_inputs": 4,
            "activation_sparsity_scale": [1.6448533535003662] * 10 + [-np.inf] * (n_layer - 10),
            "attention.shared_kv_layers": n_layer - 20, "rope.freq_base_swa": 10_000.0,
        },
        "gemma4": {
            "leading_dense_block_count": 0,
            "embedding_length_per_layer_input": n_embd // 2, "attention.shared_kv_layers": 0,
            "attention.key_length_swa": size, "attention.value_length_swa": size,
            "rope.freq_base_swa": 10_000.0,
        },
        "afmoe": {"attention.sliding_window_pattern": 4},
        "deepseek4": {
            "attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 16,
            "attention.compress_ratios": [0, 4], "attention.compress_rope_freq_base": 5000.0,
            "attention.output_group_count": 4, "attention.output_lora_rank": 32, "hash_layer_count": 0,
            "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 5,
            "hyper_connection.epsilon": 1e-6, "swiglu_clamp_exp": [10.0] * n_layer,
            "expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 4,
        },
        "qwen4exp": {
            "attention.compress_ratios": [0, 4], "hyper_connection.count": 4, "hyper_connection.low_rank": 16,
        },
        "bailingmoe": {"leading_dense_block_count": 0},
        "glm5-next": {
            "attention.indexer.kpool": 4, "attention.indexer.kpool_select_tail": True,
            "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 5,
            "hyper_connection.epsilon": 1e-6, "rope.dimension_count": 0,
        },
        "minimax-m3": {"attention.indexer.head_count": 2},
        "grovemoe": {"expert_chunk_feed_forward_length": 64},
        "step35": {"expert_weights_norm": True},
        "hy_v4": {
            "hyper_connection.count": 4, "hyper_connection.epsilon": 1e-6, "hyper_connection.magnitude": 2.0,
            "swiglu_clamp_exp": 10.0, "expert_weights_scale": 1.0, "expert_weights_norm": True,
            "attention.indexer.types": [1 - il % 2 for il in range(n_layer)],
        },
    }  # fmt: skip
    return own.get(arch, {})


def make(arch: str, has_experts: bool, path: Path) -> None:
    """Write the file with every key and tensor. Raises ValueError if llama.cpp makes no model."""
    lib, pointer = llama_cpp.library(), ctypes.c_void_p
    lib.gguf_init_empty.restype = pointer
    lib.ggml_get_name.restype, lib.ggml_get_name.argtypes = ctypes.c_char_p, [pointer]
    lib.ggml_backend_tensor_set.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]
    params = lib.llama_model_default_params()
    lib.llama_model_init_from_user.restype = pointer
    lib.llama_model_init_from_user.argtypes = [pointer, _SET, pointer, type(params)]
    lib.llama_model_save_to_file.argtypes = [pointer, ctypes.c_char_p]
    context = pointer(lib.gguf_init_empty())
    named = {f"{arch}.{key}": value for key, value in keys(arch, has_experts).items()}
    named |= {f"xielu.{name}": 1.0 for name in ("alpha_n", "alpha_p", "beta")} | {"xielu.eps": 1e-7}
    tokenizer = {"model": "test", "tokens": [f"tok_{i}" for i in range(N_VOCAB)], "scores": [0.0] * N_VOCAB}
    named |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    made: dict[str, np.ndarray] = {}
    for name, value in {"general.architecture": arch, **named}.items():
        _set_key(lib, context, name.encode(), value)

    def fill(tensor: Any, _: Any) -> None:
        at = ctypes.cast(tensor, pointer)
        name, kind = lib.ggml_get_name(at).decode(), tensor.contents.type
        assert kind in (llama_cpp.F32, llama_cpp.F16), (name, kind)
        rng = np.random.default_rng(crc32(name.encode()))
        shape = list(tensor.contents.ne)[::-1]
        values = 0.1 * rng.standard_normal(shape)
        values = -abs(values) if "ssm_a" in name else values
        values = 1 + abs(values) if "rope_freqs" in name else values
        raw = values.astype(np.float16 if kind == llama_cpp.F16 else np.float32)
        made[name] = raw
        lib.ggml_backend_tensor_set(at, raw.ctypes.data, 0, raw.nbytes)

    callback = _SET(fill)
    if not (model := lib.llama_model_init_from_user(context, callback, None, params)):
        raise ValueError(f"llama.cpp makes no {arch} model of these keys")
    if arch not in NOT_SAVED:
        lib.llama_model_save_to_file(model, str(path).encode())
        return
    writer = gguf.GGUFWriter(path, arch)
    for name, value in named.items():
        _add_key(writer, name, value)
    for name, raw in made.items():
        while raw.ndim > 1 and raw.shape[0] == 1:
            raw = raw[0]
        writer.add_tensor(name, raw)
    _close(writer)


def _add_key(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(name, value)


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _set_key(lib: ctypes.CDLL, context: ctypes.c_void_p, name: bytes, value: Any) -> None:
    if isinstance(value, bool):
        lib.gguf_set_val_bool(context, name, ctypes.c_bool(value))
    elif isinstance(value, int):
        lib.gguf_set_val_u32(context, name, ctypes.c_uint32(value))
    elif isinstance(value, float):
        lib.gguf_set_val_f32(context, name, ctypes.c_float(value))
    elif isinstance(value, str):
        lib.gguf_set_val_str(context, name, value.encode())
    elif isinstance(value[0], str):
        texts = (ctypes.c_char_p * len(value))(*[text.encode() for text in value])
        lib.gguf_set_arr_str(context, name, texts, ctypes.c_size_t(len(value)))
    else:
        is_float = isinstance(value[0], float)
        raw = np.array(value, np.float32 if is_float else np.uint32)
        kind = gguf.GGUFValueType.FLOAT32 if is_float else gguf.GGUFValueType.UINT32
        data = ctypes.c_void_p(raw.ctypes.data)
        lib.gguf_set_arr_data(context, name, int(kind), data, ctypes.c_size_t(len(value)))


def keep_real(source: Path, target: Path, unreal: str) -> None:
    """Copy a file without the keys and tensors that match `unreal`, and without empty arrays."""
    reader = gguf.GGUFReader(source)
    fields: Mapping[str, Any] = reader.fields
    arch = fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for name, field in fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or re.search(unreal, name):
            continue
        if field.types[0] != gguf.GGUFValueType.ARRAY:
            writer.add_key_value(name, field.contents(), field.types[0])
        elif len(field.data):
            writer.add_array(name, field.contents())
    for tensor in reader.tensors:
        if not re.search(unreal, tensor.name):
            writer.add_tensor(tensor.name, np.array(tensor.data))
    _close(writer)


def main() -> None:
    arch, path, has_experts = sys.argv[1], Path(sys.argv[2]), "--experts" in sys.argv[3:]
    everything = path.with_suffix(".all.gguf")
    make(arch, has_experts, everything)
    unreal = [
        SCALES_BUT_EXPERTS if arch == "gemma4" else SCALES,
        *([UNREAL[arch]] if arch in UNREAL else []),
        *([OFF] if arch in NOT_SAVED else []),
    ]
    unreal += [] if arch in READS_FACTORS else [ROPE_FACTORS]
    keep_real(everything, path, "|".join(unreal))
    everything.unlink()
    logits = llama_cpp.logits(path, [TOKENS], N_VOCAB)
    np.savez(path.with_suffix(".npz"), logits=logits, tokens=TOKENS)


if __name__ == "__main__":
    main()
