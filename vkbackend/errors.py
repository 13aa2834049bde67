"""The typed errors of vkbackend: each message says what was asked, what is there and what to do.

Every error a user can cause or meet derives from `VkbackendError`; anything else that escapes is a bug of
ours.
"""


class VkbackendError(Exception):
    """Base of all errors this package raises on purpose."""


class InvalidArgument(VkbackendError, ValueError):
    """A value given by the caller (flag, argument, request) cannot be used; `argument` is the parameter's
    name where the message begins with it."""

    def __init__(self, message: str = "", *, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


class UnknownArgument(InvalidArgument, TypeError):
    """A function was given a keyword that it does not take."""


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
    """The Vulkan loader, a driver or a device lacks something that is needed."""


class UnsupportedPlatform(UnsupportedFeature, ImportError):
    """`import vkbackend` on another system than Linux."""


class OutOfDeviceMemory(VkbackendError):
    """A device memory request exceeds what the device has; `requested` and `budget` are bytes."""

    def __init__(self, message: str, *, requested: int = 0, budget: int = 0, heap: int = 0) -> None:
        super().__init__(message)
        self.requested, self.budget, self.heap = requested, budget, heap


class DeviceLost(VkbackendError):
    """A device stopped working (VK_ERROR_DEVICE_LOST) or was abandoned after it stopped answering."""


class ForkedProcess(VkbackendError):
    """A model, a runner or a device that was made before this process was forked is used in the child."""


class Timeout(VkbackendError):
    """A wait reached its deadline; the message names what was waited for."""


class QueueFull(VkbackendError):
    """A request was refused, because as many requests wait for a slot as are allowed to."""


class DeadlineExceeded(VkbackendError):
    """A request was not done within the time it was given."""


class PlanError(VkbackendError):
    """No plan exists: split states without a rule, or shares that cannot be satisfied."""


class StateError(VkbackendError):
    """A saved state is missing, truncated or malformed, or belongs to another model, cache or sequence."""
