"""Run GGUF language models on any mix of GPUs with Vulkan compute shaders.

`LLM` is the entry point. `LLM` loads on first use, so a lower layer can be imported alone.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vkbackend.errors import (
    DeviceLost,
    ForkedProcess,
    GGUFError,
    InvalidArgument,
    OutOfDeviceMemory,
    PlanError,
    StateError,
    Timeout,
    UnsupportedFeature,
    UnsupportedModel,
    UnsupportedPlatform,
    VkbackendError,
)
from vkbackend.version import VERSION

if sys.platform != "linux":
    raise UnsupportedPlatform(
        f"vkbackend needs Linux, and this is {sys.platform!r}; docs/platforms.md says what is missing here"
    )

if TYPE_CHECKING:
    from vkbackend.models.conversation import Chat
    from vkbackend.models.engine.completion import Chunk, Completion
    from vkbackend.models.llm import LLM

__version__ = VERSION

__all__ = [
    "LLM",
    "Chat",
    "Chunk",
    "Completion",
    "DeviceLost",
    "ForkedProcess",
    "GGUFError",
    "InvalidArgument",
    "OutOfDeviceMemory",
    "PlanError",
    "StateError",
    "Timeout",
    "UnsupportedFeature",
    "UnsupportedModel",
    "UnsupportedPlatform",
    "VkbackendError",
]

_LAZY = {
    "Chat": "vkbackend.models.conversation",
    "LLM": "vkbackend.models.llm",
    "Completion": "vkbackend.models.engine.completion",
    "Chunk": "vkbackend.models.engine.completion",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'vkbackend' has no attribute {name!r}")
