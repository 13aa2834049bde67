"""The standard streams: their encoding, and errors if their reader has ended."""

import errno
import sys

# On Windows, Python encodes text in pipes with the code page. None keeps the encoding of the locale.
STREAM_ENCODING: str | None = "utf-8" if sys.platform == "win32" else None


def is_closed(error: OSError) -> bool:
    """Return whether an error of stdout means that its reader has ended. Windows says "invalid argument"."""
    return isinstance(error, BrokenPipeError) or (sys.platform == "win32" and error.errno == errno.EINVAL)
