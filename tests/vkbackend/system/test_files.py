from __future__ import annotations

from pathlib import Path

import pytest

from vkbackend.system.files import words_of

pytestmark = pytest.mark.no_vulkan


def test_words_are_divided_at_blanks_outside_quotes() -> None:
    path = str(Path("folder", "picture.png"))  # on Windows with a backslash
    assert words_of(f"{path} what?") == [path, "what?"]
    assert words_of(f"'b {path}' \"c {path}\"#") == [f"b {path}", f"c {path}#"]
    with pytest.raises(ValueError):
        words_of("it's")
