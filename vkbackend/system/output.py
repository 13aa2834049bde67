"""The encoding of the standard streams."""

import sys

# On Windows, Python reads and writes the code page through pipes. None keeps the encoding of the locale.
STREAM_ENCODING: str | None = "utf-8" if sys.platform == "win32" else None
