"""granitemoe (Granite 3 with experts): granite with a mixture of experts in every layer: softmax over the
chosen experts, and maybe a shared expert.
"""

from __future__ import annotations

from vkbackend.models.architectures import granite
from vkbackend.models.architectures.mixture import Mixture


class Model(granite.Model):
    mixture = Mixture()
