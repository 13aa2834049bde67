"""granite_swa (Granite Swash, dense and with experts): granite with attention sinks. The file says which
layers have a window and which have RoPE. IBM 2026.
"""

from __future__ import annotations

from vkbackend.meta.plan import rows
from vkbackend.models.architectures import granite
from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import check_off, read_count, read_flags, read_windowed
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF


class Model(granite.Model):
    mixture = Mixture()
    windows = True
    freq_factors = True

    def read_config(self, gguf: GGUF) -> Config:
        check_off(gguf, "deepstack_mapping", -1)
        c = super().read_config(gguf)
        n_layer = len(c.layers)
        self.turned = read_flags(gguf, "attention.rope_pattern", n_layer) or (True,) * n_layer
        local = read_windowed(gguf, n_layer, 0)
        return with_windows(c, read_count(gguf, "attention.sliding_window"), local)

    def has_rope(self, il: int) -> bool:
        return self.turned[il]

    def attention_weights(self, il: int) -> list[WeightSpec]:
        sinks = WeightSpec("attn_sinks", (self.config.layers[il].n_head,), rows("heads"))
        return [*super().attention_weights(il), sinks]
