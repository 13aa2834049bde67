"""maincoder (Maincoder-1B): hunyuan-dense, but RoPE rotates adjacent pairs. Maincode 2025."""

from __future__ import annotations

from vkbackend.models.architectures import hunyuan_dense


class Model(hunyuan_dense.Model):
    half_split = False
