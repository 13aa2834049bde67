"""Run GGUF language models on any mix of GPUs with Vulkan compute shaders.

`LLM` is the entry point. `LLM` loads on first use, so a lower layer can be imported alone.
"""

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
from vkbackend.system.supported import refuse_other_systems
from vkbackend.version import VERSION

refuse_other_systems()

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
