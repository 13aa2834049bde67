"""granitemoe (Granite 3 with experts): granite with experts in every layer and an optional shared expert. A
softmax over the chosen experts' logits weighs them.
"""

from __future__ import annotations

from vkbackend.models.architectures import granite
from vkbackend.models.architectures.mixture import Mixture


class Model(granite.Model):
    mixture = Mixture()
