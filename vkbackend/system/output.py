"""The encoding of the standard streams."""

import sys

# On Windows, Python encodes text in pipes with the code page. None keeps the encoding of the locale.
STREAM_ENCODING: str | None = "utf-8" if sys.platform == "win32" else None
