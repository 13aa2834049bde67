"""The systems on which the package works."""

import sys

from vkbackend.errors import UnsupportedPlatform


def require_linux(feature: str, platform: str = sys.platform) -> None:
    """Raises UnsupportedPlatform."""
    if platform != "linux":
        raise UnsupportedPlatform(f"{feature} needs Linux, and this is {platform!r}; see docs/platforms.md")


def refuse_other_systems(platform: str = sys.platform) -> None:
    """Raises UnsupportedPlatform."""
    if platform not in ("linux", "win32"):
        raise UnsupportedPlatform(
            f"vkbackend needs Linux or Windows, and this is {platform!r}; "
            "docs/platforms.md says what is missing here"
        )
