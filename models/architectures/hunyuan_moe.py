"""hunyuan-moe (Hunyuan-A13B): hunyuan-dense with experts and a shared expert in every layer. The router
chooses experts by softmax and normalises their weights. Tencent Hunyuan team 2025.
"""

from __future__ import annotations

from vkbackend.models.architectures import hunyuan_dense
from vkbackend.models.architectures.mixture import Mixture


class Model(hunyuan_dense.Model):
    mixture = Mixture()
