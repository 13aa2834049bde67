"""A method per op asserts shapes, chooses the shader variant and the grid, and appends a `Dispatch`.
Activations are contiguous f32 rows."""

from __future__ import annotations

from vkbackend.ops.attention import AttentionOps
from vkbackend.ops.choice import ProductOps
from vkbackend.ops.chosen import ChosenOps
from vkbackend.ops.elementwise import ElementwiseOps
from vkbackend.ops.expert_cache import ExpertCacheOps
from vkbackend.ops.heads import HeadOps
from vkbackend.ops.indexer import IndexerOps
from vkbackend.ops.kept_rows import KeptRowOps
from vkbackend.ops.kv_cache import CacheOps
from vkbackend.ops.low_rank import LowRankOps
from vkbackend.ops.moe import MoeOps
from vkbackend.ops.operands import OperandOps
from vkbackend.ops.recurrent import RecurrentOps
from vkbackend.ops.rows import RowOps
from vkbackend.ops.rwkv import RwkvOps
from vkbackend.ops.state_space import StateSpaceOps
from vkbackend.ops.streams import StreamOps


class Recorder(
    AttentionOps,
    CacheOps,
    ChosenOps,
    ElementwiseOps,
    ExpertCacheOps,
    HeadOps,
    IndexerOps,
    KeptRowOps,
    LowRankOps,
    MoeOps,
    OperandOps,
    ProductOps,
    RecurrentOps,
    RowOps,
    RwkvOps,
    StateSpaceOps,
    StreamOps,
):
    """Records ops for one device, and labels the dispatches."""
