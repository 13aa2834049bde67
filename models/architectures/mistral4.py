"""mistral4 (Mistral Small 4): deepseek2 with a temperature of q (mistral3.py). The router chooses experts by
softmax and normalises their weights. Mistral AI 2026.
"""

from __future__ import annotations

from vkbackend.models.architectures import deepseek2
from vkbackend.models.architectures.mixture import Mixture


class Model(deepseek2.Model):
    predicts_ahead = False
    mixture = Mixture()
