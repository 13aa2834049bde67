"""gemma2 (Gemma 2): gemma with norms after attention and FFN, and with soft-caps of q k^T and of the logits.
Every second layer has a window, beginning with the first. Gemma team 2024, arXiv:2408.00118.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.models.architectures import gemma
from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.reading import read_float, read_windowed
from vkbackend.models.gguf.reader import GGUF

PERIOD = 2
N_LAYER_27B = 46  # Only this size scales q k^T by a factor other than head_dim^-0.5. Files lack the factor.


class Model(gemma.Model):
    post_norms = True
    windows = True

    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        if len(c.layers) == N_LAYER_27B and "gemma2.attention.scale" not in gguf.metadata:
            layers = [replace(layer, scale=(c.n_embd / layer.n_head) ** -0.5) for layer in c.layers]
            c = replace(c, layers=tuple(layers))
        local = read_windowed(gguf, len(c.layers), PERIOD)
        return replace(
            with_windows(c, int(gguf.u32("gemma2.attention.sliding_window", 4096)), local),
            softcap=read_float(gguf, "final_logit_softcapping", 30.0, low=0.0),
            attn_softcap=read_float(gguf, "attn_logit_softcapping", 50.0, low=0.0),
        )
