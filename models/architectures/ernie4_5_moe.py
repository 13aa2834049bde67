"""ernie4_5-moe (ERNIE 4.5 with experts): ernie4_5 with experts and an optional shared expert in all but the
first layers. A softmax plus a bias chooses experts; the normalised softmax weighs them.
"""

from __future__ import annotations

from vkbackend.models.architectures import ernie4_5
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import check_off
from vkbackend.models.gguf.reader import GGUF


class Model(ernie4_5.Model):
    mixture = Mixture()

    def read_config(self, gguf: GGUF) -> Config:
        check_off(gguf, "interleave_moe_layer_step", 1)
        return super().read_config(gguf)
