"""Numpy twins of the ops, the oracle of every shader: `twins.rms_norm` is what `rms_norm.comp` computes.

A twin has its op's name, argument order and push constants. Storage arguments are arrays in binding order
(weights dequantized, or f16 as stored), then StepParams where the op reads it, then push and specialization
constants by keyword; a twin ignores constants that only tune. Outputs are written in place. Sums and products
run in float64 and are rounded once, to float32.
"""

from vkbackend.twins.attention import attn_combine as attn_combine
from vkbackend.twins.attention import attn_decode as attn_decode
from vkbackend.twins.attention import attn_prefill as attn_prefill
from vkbackend.twins.attention import kv_store as kv_store
from vkbackend.twins.attention import rope as rope
from vkbackend.twins.elementwise import add as add
from vkbackend.twins.elementwise import add_bias as add_bias
from vkbackend.twins.elementwise import columns as columns
from vkbackend.twins.elementwise import copy_words as copy_words
from vkbackend.twins.elementwise import gate_rows as gate_rows
from vkbackend.twins.elementwise import glu as glu
from vkbackend.twins.elementwise import scale as scale
from vkbackend.twins.elementwise import softcap as softcap
from vkbackend.twins.half import pack_f16 as pack_f16
from vkbackend.twins.heads import concat as concat
from vkbackend.twins.heads import mat_heads as mat_heads
from vkbackend.twins.matrix import mat_dot as mat_dot
from vkbackend.twins.matrix import mat_lane as mat_lane
from vkbackend.twins.matrix import mat_mul as mat_mul
from vkbackend.twins.matrix import mat_mul_coop as mat_mul_coop
from vkbackend.twins.matrix import mat_mul_dot as mat_mul_dot
from vkbackend.twins.matrix import mat_mul_f16 as mat_mul_f16
from vkbackend.twins.matrix import mat_tile as mat_tile
from vkbackend.twins.matrix import mat_vec as mat_vec
from vkbackend.twins.matrix import mat_wave as mat_wave
from vkbackend.twins.moe import add_id as add_id
from vkbackend.twins.moe import mat_dot_id as mat_dot_id
from vkbackend.twins.moe import mat_lane_id as mat_lane_id
from vkbackend.twins.moe import mat_mul_dot_id as mat_mul_dot_id
from vkbackend.twins.moe import mat_mul_id as mat_mul_id
from vkbackend.twins.moe import mat_mul_id_coop as mat_mul_id_coop
from vkbackend.twins.moe import mat_vec_id as mat_vec_id
from vkbackend.twins.moe import moe_group as moe_group
from vkbackend.twins.moe import moe_logits as moe_logits
from vkbackend.twins.moe import moe_sum as moe_sum
from vkbackend.twins.moe import moe_topk as moe_topk
from vkbackend.twins.quantized import quantize_q8 as quantize_q8
from vkbackend.twins.recurrent import delta_chunk as delta_chunk
from vkbackend.twins.recurrent import delta_gates as delta_gates
from vkbackend.twins.recurrent import delta_net as delta_net
from vkbackend.twins.recurrent import delta_scan as delta_scan
from vkbackend.twins.recurrent import l2_norm as l2_norm
from vkbackend.twins.recurrent import ssm_conv as ssm_conv
from vkbackend.twins.rows import add_partials as add_partials
from vkbackend.twins.rows import embed as embed
from vkbackend.twins.rows import pack_bf16 as pack_bf16
from vkbackend.twins.rows import rms_norm as rms_norm
from vkbackend.twins.rows import top_k as top_k
