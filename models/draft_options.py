"""Options for guessing the next tokens (docs/speculation.md)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from vkbackend.checks import finite, refused, whole
from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.models.arguments import (
    cache_type,
    device_list,
    layer_count,
    optional_path,
    speculation_list,
)
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.rope_options import RopeOptions
from vkbackend.ops import MAX_VEC_ROWS
from vkbackend.options_class import option

MAX_DRAFT = MAX_VEC_ROWS - 1  # A step with drafts has at most MAX_VEC_ROWS rows.


class DraftKeywords(TypedDict, total=False):
    speculation: str | Sequence[str] | None
    """How to guess the next tokens, so that one step verifies several: "ngram" repeats what followed the last
    tokens earlier in the text, and "mtp" uses the multi-token prediction head of the model's file. `draft`
    adds "draft" or "eagle3". Of several, the first that has a guess wins. None (default): no guesses. The
    text does not change (docs/speculation.md)."""
    draft: str | os.PathLike[str] | None
    """A .gguf file that drafts: a smaller model of the same vocabulary, which adds "draft" to `speculation`,
    or an EAGLE-3 head that was trained for the model, which adds "eagle3". None (default): no such file."""
    draft_devices: str | Sequence[str | int] | None
    """The devices of the draft model, like `devices`. None (default): the first of `devices`, so that drafts
    need no exchanges."""
    draft_n_gpu_layers: int | Literal["all", "auto"] | None
    """`n_gpu_layers` of the draft model. None (default): all layers."""
    draft_type_k: str
    """Type of the draft model's K cache (default: "f16")."""
    draft_type_v: str
    """Type of the draft model's V cache (default: "f16")."""
    draft_max: int
    """How many tokens a draft has at most (default: 7). Fewer are drafted where few are right."""
    draft_min: int
    """Drafts with fewer tokens are not used (default: 0)."""
    draft_p_min: float
    """A model or head ends its draft before a token that it finds less probable (default: 0.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions(RopeOptions):
    """`DraftKeywords` describes the fields. Raises InvalidArgument."""

    speculation: tuple[str, ...] = option((), speculation_list)
    draft: str | None = option(None, optional_path("a .gguf file"))
    draft_devices: tuple[str, ...] | None = option(None, device_list)
    draft_n_gpu_layers: int | Literal["auto"] | None = option(None, layer_count)
    draft_type_k: str = option("f16", cache_type)
    draft_type_v: str = option("f16", cache_type)
    draft_max: int = option(MAX_DRAFT, whole(0, 1 << 16))
    draft_min: int = option(0, whole(0, 1 << 16))
    draft_p_min: float = option(0.0, finite(0.0, 1.0))

    @property
    def with_heads(self) -> bool:
        """Return whether the model includes its multi-token prediction head."""
        return "mtp" in self.speculation

    @property
    def head(self) -> str | None:
        """Return the file of the EAGLE-3 head, which becomes a layer of the model."""
        return self.draft if "eagle3" in self.speculation else None

    def settle_draft(self) -> None:
        """Add "draft" or "eagle3" to `speculation`, by the architecture of the draft's file. Raises
        InvalidArgument if options exclude each other."""
        by_file = [kind for kind in ("draft", "eagle3") if kind in self.speculation]
        if by_file and self.draft is None:
            kind = "an EAGLE-3 head" if by_file == ["eagle3"] else "a draft model"
            raise InvalidArgument(f"speculation by {kind} needs its file; give draft (-md FILE)")
        if len(by_file) > 1:
            raise InvalidArgument(
                "draft (-md FILE) is either a model or an EAGLE-3 head; give one of draft and eagle3"
            )
        if self.draft is not None and not by_file:
            kind = "eagle3" if _is_eagle3(self.draft) else "draft"
            object.__setattr__(self, "speculation", (*self.speculation, kind))
        if self.head is not None and self.draft_devices is not None:
            raise refused(
                "draft_devices",
                list(self.draft_devices),
                "an EAGLE-3 head is a layer of the model, on its devices; leave them out",
            )
        if self.head is not None and self.with_heads:
            raise InvalidArgument(
                "a model drafts with its multi-token prediction head or an EAGLE-3 head; give one of mtp and "
                "eagle3"
            )


def _is_eagle3(path: str) -> bool:
    """Return whether a draft's file is an EAGLE-3 head. If the file cannot be read, return False, because
    loading reports the error."""
    try:
        with GGUF.open(path) as gguf:
            return gguf.architecture == "eagle3"
    except VkbackendError:
        return False
