"""granitemoe (Granite 3 with experts): granite with experts in every layer, weighted by the softmax over the
chosen ones, and maybe a shared expert.
"""

from __future__ import annotations

from vkbackend.models.architectures import granite
from vkbackend.models.architectures.mixture import Mixture


class Model(granite.Model):
    mixture = Mixture()
