"""plamo3 (PLaMo 3): norms of q and k heads, and norms after attention and FFN. Seven of eight layers have a
window, another RoPE base and no RoPE scaling. In files, the names of the norms after attention and FFN lack
".weight". Preferred Networks 2025.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.reading import read_float, read_windowed
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable

PERIOD = 8
POST_NORMS = "post_attention_norm", "post_ffw_norm"


class Model(Decoder):
    post_norms = True
    windows = True

    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        window = int(gguf.u32("plamo3.attention.sliding_window", 0))
        local = read_windowed(gguf, len(c.layers), PERIOD)
        return with_windows(c, window, local, "rope_swa") if window else c

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        tables = super().read_ropes(gguf)
        base = read_float(gguf, "rope.freq_base_swa", 10_000.0)
        return tables | {"rope_swa": RopeTable(tables["rope"].n_rot, base)}

    def layer_weights(self, il: int) -> list[WeightSpec]:
        specs = [*super().layer_weights(il), *self.head_norm_weights(il)]
        return [
            replace(spec, source=f"blk.{il}.{spec.name}") if spec.name in POST_NORMS else spec
            for spec in specs
        ]
