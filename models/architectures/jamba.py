"""jamba (Jamba): layers without kv heads are Mamba-1 layers with norms of dt, B and C. The other layers have
attention without RoPE. Layers without a router in the file have a dense FFN. Lieber et al. 2024,
arXiv:2403.19887.
"""

from __future__ import annotations

from vkbackend.models.architectures.config import Config, dense_if_stored
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.selective import Selection, SelectiveDecoder
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating
from vkbackend.rope import RopeTable


class Model(SelectiveDecoder):
    mixture = Mixture(gating=Gating(norm_w=False))

    def read_config(self, gguf: GGUF) -> Config:
        self.selection = Selection.from_gguf(gguf, normed=True)
        config = dense_if_stored(Config.from_gguf(gguf, self.mixture, low=0), gguf)
        self.recurrent = [not layer.n_head_kv for layer in config.layers]
        return config

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        return {}

    def has_rope(self, il: int) -> bool:
        return False
