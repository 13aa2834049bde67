"""refact (Refact 1.6B): llama with ALiBi and one kv head. Refact.ai 2023."""

from __future__ import annotations

from vkbackend.models.architectures.alibi import Alibi


class Model(Alibi):
    pass
