"""The op set: one callable per op that records a dispatch of it, and `OPS`, what shaders are called with.

An op checks shapes (assertions: a wrong shape is our bug), picks the variant, specialization constants and
grid, and appends a `Dispatch`. Products are entries of `MATRIX_OPS` and `EXPERTS_OPS` (table.py), all others
functions. Activations are contiguous f32 rows. Knows no model and no second device.
"""

from vkbackend.ops.attention import CACHE_TYPES as CACHE_TYPES
from vkbackend.ops.attention import CELL_BLOCK as CELL_BLOCK
from vkbackend.ops.attention import HeadNorm as HeadNorm
from vkbackend.ops.attention import Rotation as Rotation
from vkbackend.ops.attention import attn_combine as attn_combine
from vkbackend.ops.attention import attn_decode as attn_decode
from vkbackend.ops.attention import attn_prefill as attn_prefill
from vkbackend.ops.attention import attn_splits as attn_splits
from vkbackend.ops.attention import kv_store as kv_store
from vkbackend.ops.attention import rope as rope
from vkbackend.ops.choice import convert as convert
from vkbackend.ops.choice import experts_operand_type as experts_operand_type
from vkbackend.ops.choice import mat as mat
from vkbackend.ops.choice import mat_id as mat_id
from vkbackend.ops.choice import mat_op as mat_op
from vkbackend.ops.choice import operand_type as operand_type
from vkbackend.ops.choice import tile_size as tile_size
from vkbackend.ops.elementwise import add as add
from vkbackend.ops.elementwise import add_bias as add_bias
from vkbackend.ops.elementwise import columns as columns
from vkbackend.ops.elementwise import copy_words as copy_words
from vkbackend.ops.elementwise import gate_rows as gate_rows
from vkbackend.ops.elementwise import glu as glu
from vkbackend.ops.elementwise import scale as scale
from vkbackend.ops.elementwise import softcap as softcap
from vkbackend.ops.experts import COLUMNS as COLUMNS
from vkbackend.ops.experts import ROWS as ROWS
from vkbackend.ops.experts import ExpertsOp as ExpertsOp
from vkbackend.ops.experts import Groups as Groups
from vkbackend.ops.experts import moe_group as moe_group
from vkbackend.ops.experts import tile_count as tile_count
from vkbackend.ops.half import pack_f16 as pack_f16
from vkbackend.ops.heads import concat as concat
from vkbackend.ops.heads import mat_heads as mat_heads
from vkbackend.ops.matrix import MAX_VEC_ROWS as MAX_VEC_ROWS
from vkbackend.ops.matrix import MatrixOp as MatrixOp
from vkbackend.ops.moe import Gating as Gating
from vkbackend.ops.moe import add_id as add_id
from vkbackend.ops.moe import moe_logits as moe_logits
from vkbackend.ops.moe import moe_sum as moe_sum
from vkbackend.ops.moe import moe_topk as moe_topk
from vkbackend.ops.quantized import quantize_q8 as quantize_q8
from vkbackend.ops.recurrent import delta_chunk as delta_chunk
from vkbackend.ops.recurrent import delta_gates as delta_gates
from vkbackend.ops.recurrent import delta_net as delta_net
from vkbackend.ops.recurrent import delta_scan as delta_scan
from vkbackend.ops.recurrent import delta_work as delta_work
from vkbackend.ops.recurrent import l2_norm as l2_norm
from vkbackend.ops.recurrent import ssm_conv as ssm_conv
from vkbackend.ops.rows import MAX_SLOTS as MAX_SLOTS
from vkbackend.ops.rows import MAX_TOP_K as MAX_TOP_K
from vkbackend.ops.rows import NO_OWN as NO_OWN
from vkbackend.ops.rows import OUTPUTS as OUTPUTS
from vkbackend.ops.rows import TOKENS as TOKENS
from vkbackend.ops.rows import add_partials as add_partials
from vkbackend.ops.rows import embed as embed
from vkbackend.ops.rows import pack_bf16 as pack_bf16
from vkbackend.ops.rows import rms_norm as rms_norm
from vkbackend.ops.rows import top_k as top_k
from vkbackend.ops.rows import top_k_chunks as top_k_chunks
from vkbackend.ops.table import EXPERTS_OPS as EXPERTS_OPS
from vkbackend.ops.table import MATRIX_OPS as MATRIX_OPS
from vkbackend.ops.table import OPS as OPS
