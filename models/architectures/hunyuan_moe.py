"""hunyuan-moe (Hunyuan-A13B): hunyuan-dense with a mixture of experts in every layer: softmax over all
experts, the chosen weights normalised, and a shared expert. Tencent Hunyuan team 2025.
"""

from __future__ import annotations

from vkbackend.models.architectures import hunyuan_dense
from vkbackend.models.architectures.mixture import Mixture


class Model(hunyuan_dense.Model):
    mixture = Mixture()
