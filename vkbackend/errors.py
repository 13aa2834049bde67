"""Typed errors. A message says what was asked, what exists and what to do.

Errors that a user can cause derive from `VkbackendError`. Any other exception that escapes is a bug.
"""


class VkbackendError(Exception):
    """Base class of the package's errors."""


class InvalidArgument(VkbackendError, ValueError):
    """A flag, argument or request has an unusable value. `argument` is the parameter's name if the message
    begins with it."""

    def __init__(self, message: str = "", *, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


class UnknownArgument(InvalidArgument, TypeError):
    """A function got an unknown keyword."""


class PromptTooLong(InvalidArgument):
    """A prompt of `n_tokens` does not fit the context of `n_ctx`."""

    def __init__(self, message: str = "", *, argument: str = "", n_tokens: int = 0, n_ctx: int = 0) -> None:
        super().__init__(message, argument=argument)
        self.n_tokens, self.n_ctx = n_tokens, n_ctx


class GGUFError(VkbackendError):
    """A model file is missing, truncated, malformed or inconsistent."""


class UnsupportedModel(VkbackendError):
    """The file is well formed, but its architecture, tensor type or tokenizer is not supported."""


class UnsupportedFeature(VkbackendError):
    """The Vulkan loader, a driver or a device lacks a required feature."""


class UnsupportedPlatform(UnsupportedFeature, ImportError):
    """vkbackend was imported on a system other than Linux."""


class OutOfDeviceMemory(VkbackendError):
    """A device has less memory than requested; `requested` and `budget` are bytes."""

    def __init__(self, message: str, *, requested: int = 0, budget: int = 0, heap: int = 0) -> None:
        super().__init__(message)
        self.requested, self.budget, self.heap = requested, budget, heap


class DeviceLost(VkbackendError):
    """A device failed (VK_ERROR_DEVICE_LOST) or stopped answering."""


class ForkedProcess(VkbackendError):
    """A forked child used a model, runner or device of its parent."""


class Timeout(VkbackendError):
    """A wait reached its deadline."""


class QueueFull(VkbackendError):
    """Too many requests are waiting for a slot."""


class DeadlineExceeded(VkbackendError):
    """A request missed its deadline."""


class PlanError(VkbackendError):
    """No plan exists, because split states have no rule or shares cannot be satisfied."""


class StateError(VkbackendError):
    """A saved state is missing, truncated or malformed, or belongs to another model, cache or sequence."""
