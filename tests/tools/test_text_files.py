from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from vkbackend.tools.chat import read_message
from vkbackend.tools.flags.prompt import read_prompt
from vkbackend.tools.flags.templates import read_template
from vkbackend.tools.server.guard import read_keys

pytestmark = pytest.mark.no_vulkan


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes("\ufeffkey\n".encode())
    assert read_message(str(file)) == read_prompt(Namespace(file=str(file), prompt=None)) == "key"
    assert read_template(str(file)) == "key\n" and read_keys((), str(file)) == ("key",)
