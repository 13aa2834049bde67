"""The systems on which the package works."""

import sys

from vkbackend.errors import UnsupportedPlatform


def refuse_other_systems(platform: str = sys.platform) -> None:
    """Raises UnsupportedPlatform."""
    if platform not in ("linux", "win32"):
        raise UnsupportedPlatform(
            f"vkbackend needs Linux or Windows, and this is {platform!r}; "
            "docs/platforms.md says what is missing here"
        )
