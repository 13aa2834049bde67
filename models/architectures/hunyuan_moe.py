"""hunyuan-moe (Hunyuan-A13B): hunyuan-dense with a shared expert and experts in every layer, chosen by
softmax with normalised weights. Tencent Hunyuan team 2025.
"""

from __future__ import annotations

from vkbackend.models.architectures import hunyuan_dense
from vkbackend.models.architectures.mixture import Mixture


class Model(hunyuan_dense.Model):
    mixture = Mixture()
