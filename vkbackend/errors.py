"""Typed errors. A message says what failed, which values are valid and what to do.

Errors that a user can cause derive from `VkbackendError`. Any other exception is a bug.
"""


class VkbackendError(Exception):
    """Base class of the package's errors."""


class InvalidArgument(VkbackendError, ValueError):
    """A flag, argument or request has an invalid value. If the message begins with a parameter's name,
    `argument` is that name."""

    def __init__(self, message: str = "", *, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


class UnknownArgument(InvalidArgument, TypeError):
    """A function was called with an unknown keyword."""


class PromptTooLong(InvalidArgument):
    """A prompt of `n_tokens` does not fit the context of `n_ctx`."""

    def __init__(self, message: str = "", *, argument: str = "", n_tokens: int = 0, n_ctx: int = 0) -> None:
        super().__init__(message, argument=argument)
        self.n_tokens, self.n_ctx = n_tokens, n_ctx


class GGUFError(VkbackendError):
    """A model file is missing, truncated, malformed or inconsistent."""


class AdapterError(VkbackendError):
    """An adapter's file is missing, malformed, or for another model."""


class UnsupportedModel(VkbackendError):
    """The architecture, tensor type or tokenizer of a valid file is not supported."""


class UnsupportedFeature(VkbackendError):
    """The Vulkan loader, a driver or a device lacks a required feature."""


class UnsupportedPlatform(UnsupportedFeature, ImportError):
    """vkbackend was imported on a system other than Linux."""


class OutOfDeviceMemory(VkbackendError):
    """A device has less memory than requested. `requested` and `budget` are bytes."""

    def __init__(self, message: str, *, requested: int = 0, budget: int = 0, heap: int = 0) -> None:
        super().__init__(message)
        self.requested, self.budget, self.heap = requested, budget, heap


class DeviceLost(VkbackendError):
    """A device failed with VK_ERROR_DEVICE_LOST or does not respond."""


class ForkedProcess(VkbackendError):
    """A forked process used a model, runner or device of its parent process."""


class Timeout(VkbackendError):
    """An operation did not finish within its time limit."""


class QueueFull(VkbackendError):
    """Too many requests are waiting for a slot."""


class DeadlineExceeded(VkbackendError):
    """A request did not finish before its deadline."""


class PlanError(VkbackendError):
    """The model cannot be divided over the devices. An op has no rule for its inputs' split states, or the
    requested shares are impossible."""


class StateError(VkbackendError):
    """A saved state is missing or damaged, or does not match this model, cache or sequence."""
