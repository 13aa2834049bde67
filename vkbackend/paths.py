"""Paths and errors of files in messages."""

from __future__ import annotations

import os


def quoted(path: str | os.PathLike[str]) -> str:
    """Return the `repr` of a path with single backslashes, which separate folders on Windows. If the path has
    characters that cannot be printed, they are escaped and backslashes are doubled."""
    text = os.fsdecode(path)
    return repr(text).replace(r"\\", "\\") if text.isprintable() else repr(text)


def why(error: Exception) -> str:
    """Return an error's text without the number and the path of an OSError."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
