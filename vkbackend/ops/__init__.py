"""The op set: a `Recorder` has a method per op, `OPS` what each shader is called with.

Products with one matrix or with experts are entries of `MATRIX_OPS` and `EXPERTS_OPS` (table.py); the
recorder's `mat` and `mat_id` choose among them.
"""

from vkbackend.ops.attention import CACHE_TYPES as CACHE_TYPES
from vkbackend.ops.attention import HeadNorm as HeadNorm
from vkbackend.ops.attention import Rotation as Rotation
from vkbackend.ops.attention_tiles import CELL_BLOCK as CELL_BLOCK
from vkbackend.ops.attention_tiles import attends_by_units as attends_by_units
from vkbackend.ops.attention_tiles import attn_splits as attn_splits
from vkbackend.ops.attention_tiles import heads_by_units as heads_by_units
from vkbackend.ops.attention_tiles import tile_of_units as tile_of_units
from vkbackend.ops.choice import experts_operand_type as experts_operand_type
from vkbackend.ops.choice import mat_op as mat_op
from vkbackend.ops.choice import operand_type as operand_type
from vkbackend.ops.choice import tile_size as tile_size
from vkbackend.ops.experts import COLUMNS as COLUMNS
from vkbackend.ops.experts import ROWS as ROWS
from vkbackend.ops.experts import ExpertsOp as ExpertsOp
from vkbackend.ops.experts import Groups as Groups
from vkbackend.ops.experts import tile_count as tile_count
from vkbackend.ops.matrix import MAX_VEC_ROWS as MAX_VEC_ROWS
from vkbackend.ops.matrix import MatrixOp as MatrixOp
from vkbackend.ops.moe import Gating as Gating
from vkbackend.ops.recorder import Recorder as Recorder
from vkbackend.ops.recurrent import delta_work as delta_work
from vkbackend.ops.rows import MAX_SLOTS as MAX_SLOTS
from vkbackend.ops.rows import MAX_TOP_K as MAX_TOP_K
from vkbackend.ops.rows import NO_OWN as NO_OWN
from vkbackend.ops.rows import OUTPUTS as OUTPUTS
from vkbackend.ops.rows import POSITIONS as POSITIONS
from vkbackend.ops.rows import TOKENS as TOKENS
from vkbackend.ops.rows import top_k_chunks as top_k_chunks
from vkbackend.ops.table import EXPERTS_OPS as EXPERTS_OPS
from vkbackend.ops.table import MATRIX_OPS as MATRIX_OPS
from vkbackend.ops.table import OPS as OPS
