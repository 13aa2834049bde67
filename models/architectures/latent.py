"""Latent attention (MLA; DeepSeek-AI 2024, arXiv:2405.04434) with one kv head. The value is the normed
latent. The key is the normed latent followed by dimensions that all heads share. Each head multiplies its q
and its result by a matrix. DeepSeek-V3 caches 576 values per position instead of 40,960.

Files from before April 2025 fuse keys and values in attn_kv_b, which cannot be absorbed into q, so every head
has a key and a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.ops.chosen_attention import attend_chosen
from vkbackend.meta.ops.heads import concat, mat_heads
from vkbackend.meta.plan import MIRROR, Role, columns, rows
from vkbackend.meta.policy import Attention
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config, LayerConfig
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import KeyRotation, LayerCache
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.architectures.weight_specs import WeightSpec, fused
from vkbackend.models.gguf.reader import GGUF


class LatentAttention(Decoder):
    """If `applies_rope`, RoPE rotates the shared dimensions of keys (table "rope") and of q (table `q_rope`).
    A model may lack shared dimensions. `rank_q` is the size of q's latent, or 0. If attention reads only
    chosen positions, it reads blocks of `block_size` positions. With `tail`, the last block is incomplete."""

    applies_rope = True
    q_rope = "rope"
    half_split = False
    block_size = 1
    tail = False

    def read_latent(self, gguf: GGUF, config: Config) -> Config:
        """Read the sizes, and set one kv head per layer."""
        self.latent = read_count(gguf, "attention.kv_lora_rank")
        self.shared = int(gguf.u32(f"{gguf.architecture}.rope.dimension_count"))
        self.rank_q = int(gguf.u32(f"{gguf.architecture}.attention.q_lora_rank", 0))
        self.full = f"{gguf.architecture}.attention.key_length_mla" not in gguf.metadata
        kind = "" if self.full else "_mla"
        width, self.size_v = (read_count(gguf, f"attention.{of}_length{kind}") for of in ("key", "value"))
        self.nope = width - self.shared
        if self.full:
            if self.nope <= 0:
                raise GGUFError(
                    f"{gguf.paths[0]}: key size {width} is not above the {self.shared} shared dimensions"
                )
            return replace(config, layers=tuple(replace(la, n_rot=self.shared) for la in config.layers))
        layers = []
        for layer in config.layers:
            if layer.n_head_kv and (layer.head_dim != self.latent + self.shared or self.nope <= 0):
                raise GGUFError(
                    f"{gguf.paths[0]}: key size {layer.head_dim} is not latent size {self.latent} plus "
                    f"{self.shared} shared dimensions"
                )
            layers.append(
                replace(layer, n_head_kv=1, head_dim_v=self.latent, scale=width**-0.5, n_rot=self.shared)
            )
        return replace(config, layers=tuple(layers))

    # ---- weights ----

    def attention_weights(self, il: int) -> list[WeightSpec]:
        n_embd, n_head = self.config.n_embd, self.config.layers[il].n_head
        specs = [WeightSpec("attn_norm", (n_embd,))]
        if self.rank_q:
            specs += [
                WeightSpec("attn_q_a", (self.rank_q, n_embd)),
                WeightSpec("attn_q_a_norm", (self.rank_q,)),
            ]
        n_in = self.rank_q or n_embd
        of_latent, n_v = rows("kv_heads"), n_head * self.size_v
        up = [
            WeightSpec("attn_k_b", (n_head * self.latent, self.nope), rows("heads"), stacked=n_head),
            WeightSpec("attn_v_b", (n_v, self.latent), rows("heads"), stacked=n_head),
        ]
        if self.full:
            of_latent = MIRROR
            up = [
                WeightSpec("attn_k_up", (n_head * self.nope, self.latent), rows("kv_heads")),
                WeightSpec("attn_v_up", (n_v, self.latent), rows("kv_heads")),
            ]
        return [
            *specs,
            *self._with_shared("attn_q", n_head, self.nope, n_in, rows("heads")),
            *self._with_shared("attn_latent", 1, self.latent, n_embd, of_latent),
            WeightSpec("attn_kv_a_norm", (self.latent,)),
            *up,
            WeightSpec("attn_output", (n_embd, n_head * self.size_v), columns("heads")),
        ]

    def _with_shared(self, name: str, n: int, width: int, n_in: int, role: Role) -> list[WeightSpec]:
        """Return the weight of n vectors of `width`, and the weight of their shared dimensions if the model
        has any."""
        specs = [WeightSpec(name, (n * width, n_in), role)]
        if self.shared:
            named = name.replace("latent", "k") + "_shared"
            specs.append(WeightSpec(named, (n * self.shared, n_in), role))
        return specs

    def _as_stored(self, specs: list[WeightSpec], prefix: str) -> list[WeightSpec]:
        by_name = {spec.name: spec for spec in super()._as_stored(specs, prefix)}
        for names, tensor, per_head in (
            (("attn_q", "attn_q_shared"), "attn_q_b" if self.rank_q else "attn_q", True),
            (("attn_latent", "attn_k_shared"), "attn_kv_a_mqa", False),
            (("attn_k_up", "attn_v_up"), "attn_kv_b", True),
        ):
            full_names = [f"{prefix}{name}.weight" for name in names]
            if full_names[0] in by_name and full_names[1] not in by_name:  # without shared dimensions
                whole = replace(by_name[full_names[0]], source=f"{prefix}{tensor}.weight")
                by_name[full_names[0]] = whole
            if all(name in by_name for name in full_names):
                parts = [by_name[name] for name in full_names]
                repeat = parts[0].shape[0] // self.nope if per_head else 1
                by_name |= {spec.name: spec for spec in fused(f"{prefix}{tensor}.weight", parts, repeat)}
        return list(by_name.values())

    def attention_of(self, il: int, types: Mapping[str, str]) -> Attention:
        return replace(super().attention_of(il, types), head_dim_v=self.size_v)

    def key_rotation(self, il: int) -> KeyRotation | None:
        raise UnsupportedModel("latent attention (MLA) stores keys that RoPE rotates only at their end")

    # ---- graph ----

    def choose(self, h: Tensor, q: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor | None:
        """Return the positions that each row attends to, or None for all (indexed.py). `q` is the input of
        q's projection."""
        return None

    def attention(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        eps = self.config.eps
        c, q_in = linear(x, w, "attn_latent"), x
        if self.rank_q:
            q_in = ops.rms_norm(linear(x, w, "attn_q_a"), w("attn_q_a_norm"), eps)
        chosen = self.choose(x, q_in, w, cache, il)
        q = linear(q_in, w, "attn_q")
        q_shared = self.turned_shared(linear(q_in, w, "attn_q_shared"), self.q_rope) if self.shared else None
        if self.q_rope == "rope_q":
            q = ops.rope(q, self.nope, "still_q")
        c = ops.head_norm(c, w("attn_kv_a_norm"), self.latent, eps)
        self.store_latent(c, x, w, cache)
        if self.full:
            return self.attend(self.joined(q, q_shared, self.nope), c, w, cache, il)
        layer = self.config.layers[il]
        q = self.joined(mat_heads(q, w("attn_k_b"), layer.n_head), q_shared, self.latent)
        a = self.attend_chosen(q, w, cache, chosen, layer) if chosen else self.attend_all(q, w, cache, layer)
        a = mat_heads(a, w("attn_v_b"), layer.n_head)
        return linear(self.gate(a, x, w), w, "attn_output")

    def turned_shared(self, x: Tensor, table: str = "rope") -> Tensor:
        """Rotate the shared dimensions of q or of the key."""
        return ops.rope(x, self.shared, table, half_split=self.half_split) if self.applies_rope else x

    def joined(self, x: Tensor, shared: Tensor | None, n: int) -> Tensor:
        """Return x with the shared dimensions appended to each head of n elements."""
        return x if shared is None else concat(x, shared, n, self.shared)

    def store(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> None:
        c = linear(x, w, "attn_latent")
        self.store_latent(ops.head_norm(c, w("attn_kv_a_norm"), self.latent, self.config.eps), x, w, cache)

    def store_latent(self, c: Tensor, x: Tensor, w: Weights, cache: LayerCache) -> None:
        """Store the normed latent `c` and the shared dimensions of x. If the file has attn_kv_b, store
        instead a key and a value per head, computed from both."""
        k_shared = self.turned_shared(linear(x, w, "attn_k_shared")) if self.shared else None
        k, v, n = c, c, self.latent
        if self.full:
            k, v, n = linear(c, w, "attn_k_up"), linear(c, w, "attn_v_up"), self.nope
        ops.kv_store(self.joined(k, k_shared, n), cache.k, cache.cells, n + self.shared)
        ops.kv_store(v, cache.v, cache.cells, v.width // (k.width // n))

    def attend_all(self, q: Tensor, w: Weights, cache: LayerCache, layer: LayerConfig) -> Tensor:
        return ops.attention(
            q,
            cache.k,
            cache.v,
            cache.cells,
            heads=layer.n_head,
            kv_heads=1,
            head_dim_k=layer.head_dim,
            head_dim_v=layer.head_dim_v,
            scale=layer.scale,
            sinks=w.get("attn_sinks.weight"),
        )

    def attend_chosen(
        self, q: Tensor, w: Weights, cache: LayerCache, chosen: Tensor, layer: LayerConfig
    ) -> Tensor:
        return attend_chosen(
            q,
            cache.k,
            cache.v,
            cache.cells,
            chosen,
            heads=layer.n_head,
            head_dim_k=layer.head_dim,
            head_dim_v=layer.head_dim_v,
            scale=layer.scale,
            block=self.block_size,
            tail=self.tail,
            sinks=w.get("attn_sinks.weight"),
        )
