"""Ops on tensors over N devices. Each op derives its result's split state, and records a dispatch per device.
If an op needs the full sum of a PARTIAL operand, it all-reduces the operand. So model code is written as for
one device.
"""

from vkbackend.meta.ops.dense_attention import attention, kv_load, kv_move, kv_store, rope, self_attention
from vkbackend.meta.ops.elementwise import (
    add_vector,
    clamp,
    gate_heads,
    gate_rows,
    gelu,
    gelu_erf,
    gelu_mul,
    gelu_quick,
    mul,
    mul_vector,
    relu2,
    relu_mul,
    scale,
    sigmoid,
    sigmoid_mul,
    silu,
    silu_mul,
    silu_mul_clamped,
    silu_of_clamped,
    situ_mul,
    softcap,
    swiglu_oai,
    xielu,
)
from vkbackend.meta.ops.matrix import linear
from vkbackend.meta.ops.rows import (
    center,
    columns,
    copy,
    head_norm,
    host_rows,
    joined_rows,
    layer_norm,
    pool_rows,
    rms_norm,
)
from vkbackend.meta.ops.vocabulary import embed, hidden_states, image_rows, logits, outputs, with_images
from vkbackend.meta.sums import add, same_bits, together, whole

__all__ = [
    "add", "add_vector", "attention", "center", "clamp", "columns", "copy", "embed", "gate_heads",
    "gate_rows", "gelu", "gelu_erf", "gelu_mul", "gelu_quick", "head_norm", "hidden_states", "host_rows",
    "image_rows", "joined_rows", "kv_load", "kv_move", "kv_store", "layer_norm", "linear", "logits",
    "mul", "mul_vector", "outputs", "pool_rows", "relu2", "relu_mul", "rms_norm", "rope", "same_bits",
    "scale", "self_attention", "sigmoid", "sigmoid_mul", "silu", "silu_mul", "silu_mul_clamped",
    "silu_of_clamped", "situ_mul", "softcap", "swiglu_oai", "together", "whole", "with_images", "xielu",
]  # fmt: skip
