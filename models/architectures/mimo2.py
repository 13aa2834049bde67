"""mimo2 (MiMo V2 Flash): windowed layers have an attention sink per head, another number of kv heads, and
another RoPE base. Values are smaller than keys, and are multiplied by a constant. Layers without a dense
FFN in the file have experts, chosen by a sigmoid plus a bias. Xiaomi 2026, arXiv:2601.02780.
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config, dense_if_stored, with_windows
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count, read_float, read_windowed
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating
from vkbackend.rope import RopeTable


class Model(Decoder):
    mixture = Mixture(gating=Gating("sigmoid"))
    windows = True

    def read_config(self, gguf: GGUF) -> Config:
        c = dense_if_stored(super().read_config(gguf), gguf)
        self.value_scale = read_float(gguf, "attention.value_scale", 1.0)
        local = read_windowed(gguf, len(c.layers), 0)
        return with_windows(c, read_count(gguf, "attention.sliding_window"), local, "rope_swa")

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        tables = super().read_ropes(gguf)
        base = read_float(gguf, "rope.freq_base_swa", tables["rope"].freq_base)
        return tables | {"rope_swa": RopeTable(tables["rope"].n_rot, base)}

    def attention_weights(self, il: int) -> list[WeightSpec]:
        specs = super().attention_weights(il)
        if f"blk.{il}.attn_sinks.weight" not in self._shapes:
            return specs
        return [*specs, WeightSpec("attn_sinks", (self.config.layers[il].n_head,), rows("heads"))]

    def gate(self, a: Tensor, x: Tensor, w: Weights) -> Tensor:
        return a if self.value_scale == 1.0 else ops.scale(a, self.value_scale)
