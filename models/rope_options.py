"""Options that replace the file's RoPE values, to extend the context. Their names are llama.cpp's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from vkbackend.checks import choice, finite, optional, refused, whole
from vkbackend.meta.options import ReduceOptions
from vkbackend.models.gguf.reader import GGUF
from vkbackend.options_class import option
from vkbackend.rope import SCALINGS

MAX_STRETCH, MAX_BASE, MAX_ORIG_CTX = 1e6, 1e15, 1 << 30
_NO_SCALING = ("", "none")


class RopeKeywords(TypedDict, total=False):
    rope_scaling: str | None
    """How RoPE is scaled: "none", "linear" or "yarn". None (default): as in the file, else linear."""
    rope_scale: float | None
    """The factor by which the context grows. None (default): the value of the file."""
    rope_freq_scale: float | None
    """The factor of positions: 1 / rope_scale. Give only one of the two. None (default): the value of the
    file."""
    rope_freq_base: float | None
    """The base of RoPE's frequencies. None (default) or 0: the value of the file."""
    yarn_orig_ctx: int
    """YaRN: the context length that the model was trained with. 0 (default): the value of the file."""
    yarn_ext_factor: float | None
    """YaRN: how much of their unscaled angle the fast pairs keep; 0 is linear scaling. None (default) or -1:
    1."""
    yarn_attn_factor: float | None
    """The factor of cos and sin. None (default) or -1: the value of the file."""
    yarn_beta_fast: float | None
    """YaRN: pairs that rotate more often than this keep their angle. None (default) or -1: the value of the
    file, or 32."""
    yarn_beta_slow: float | None
    """YaRN: pairs that rotate less often than this are scaled. None (default) or -1: the value of the file,
    or 1."""


_stretch = optional(finite(0.0, MAX_STRETCH))
_yarn = optional(finite(-1.0, MAX_STRETCH))


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeOptions(ReduceOptions):
    rope_scaling: str | None = option(None, optional(choice(SCALINGS)))
    rope_scale: float | None = option(None, _stretch)
    rope_freq_scale: float | None = option(None, _stretch)
    rope_freq_base: float | None = option(None, optional(finite(0.0, MAX_BASE)))
    yarn_orig_ctx: int = option(0, whole(0, MAX_ORIG_CTX))
    yarn_ext_factor: float | None = option(None, _yarn)
    yarn_attn_factor: float | None = option(None, _yarn)
    yarn_beta_fast: float | None = option(None, _yarn)
    yarn_beta_slow: float | None = option(None, _yarn)

    @property
    def rope_factor(self) -> float | None:
        """Raises InvalidArgument if rope_scale and rope_freq_scale are both set."""
        if self.rope_scale and self.rope_freq_scale:
            raise refused("rope_scale", self.rope_scale, "rope_freq_scale is its reciprocal; leave one out")
        return 1.0 / self.rope_freq_scale if self.rope_freq_scale else self.rope_scale or None


def state_rope(gguf: GGUF, options: RopeOptions) -> None:
    gguf.stated = {}
    rope = f"{gguf.architecture}.rope."
    factor, kind = options.rope_factor, options.rope_scaling
    if factor and kind is None and (gguf.string(rope + "scaling.type", "") or "") in _NO_SCALING:
        kind = "linear"
    if kind == "none":
        factor = 0.0
    given = {
        "freq_base": options.rope_freq_base or None,
        "scaling.type": kind,
        "scaling.factor": factor,
        "scale_linear": factor,
        "scaling.original_context_length": options.yarn_orig_ctx or None,
        "scaling.yarn_ext_factor": _unless_default(options.yarn_ext_factor),
        "scaling.attn_factor": _unless_default(options.yarn_attn_factor),
        "scaling.yarn_beta_fast": _unless_default(options.yarn_beta_fast),
        "scaling.yarn_beta_slow": _unless_default(options.yarn_beta_slow),
    }
    gguf.stated = {rope + name: value for name, value in given.items() if value is not None}


def _unless_default(value: float | None) -> float | None:
    return None if value is None or value < 0 else value
