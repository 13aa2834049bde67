"""deepseek4 (DeepSeek V4 Flash, Pro): attention to a window and to entries (compressed.py), and a residual of
several streams (hyper_connected.py). Gates sum the streams before the output norm. Experts are scored by the
root of a softplus. In the first layers, a table chooses the experts of each token. Activations are bounded.
DeepSeek-AI 2026.
"""

from __future__ import annotations

import numpy as np

from vkbackend.errors import GGUFError
from vkbackend.meta import ops
from vkbackend.meta.ops import streams
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.compressed import CompressedAttention
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.mixture import BY_TOKEN, Mixture
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating


class Model(CompressedAttention):
    mixture = Mixture(gating=Gating("root_softplus"), limits_gate=True)

    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        tables = {il: self.read_by_token(gguf, c, il) for il in range(len(c.layers))}
        self.by_token = {il: table for il, table in tables.items() if table is not None}
        return c

    def read_by_token(self, gguf: GGUF, c: Config, il: int) -> np.ndarray | None:
        """Return the experts of each token, f32 [n_vocab, n_used], or None if the layer scores experts."""
        name, mixture = f"blk.{il}.ffn_gate_tid2eid.weight", c.layers[il].mixture
        if (info := gguf.tensors.get(name)) is None or mixture is None:
            return None
        shape = c.n_vocab, mixture.n_used
        if info.type not in ("i32", "f32") or info.shape != shape:
            raise GGUFError(f"{gguf.paths[0]}: {name} is {info.type} {info.shape}, expected i32 {shape}")
        table = gguf.data(name).view("<i4" if info.type == "i32" else "<f4").reshape(shape)
        if not (0 <= table.min() and table.max() < mixture.n_expert):
            raise GGUFError(f"{gguf.paths[0]}: {name} names experts outside 0..{mixture.n_expert - 1}")
        return table.astype(np.float32)

    def unread(self) -> set[str]:
        return super().unread() | {f"blk.{il}.ffn_gate_tid2eid.weight" for il in self.by_token}

    def outer_weights(self) -> list[WeightSpec]:
        m = self.n_stream
        return [
            *super().outer_weights(),
            WeightSpec("output_hc_fn.weight", (m, m * self.config.n_embd)),
            WeightSpec("output_hc_base.weight", (m,)),
            WeightSpec("output_hc_scale.weight", (1,)),
        ]

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        specs = super().feed_forward_weights(il)
        if (table := self.by_token.get(il)) is not None:
            specs.append(WeightSpec(BY_TOKEN, table.shape, host=True, values=table))
        return specs

    def hidden_outputs(self, h: Tensor, w: Weights) -> Tensor:
        h = ops.outputs(h)
        by = self.mixes(h, w, "output_hc"), w("output_hc_scale"), w("output_hc_base")
        return self.output_norm(streams.mix(h, *by, self.n_stream, self.stream_eps), w)
