"""The files, packages, hooks and threads that docs/architecture.md names exist."""

from __future__ import annotations

import re

import pytest
from places import ROOT

from vkbackend.models.architectures.config import LayerConfig
from vkbackend.models.architectures.decoder import Decoder

pytestmark = pytest.mark.no_vulkan

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FOLDERS = (
    "",
    "meta",
    "models",
    "models/architectures",
    "models/placement",
    "models/sampling",
    "shaders",
    "tests/support/oracles",
)


def named(pattern: str) -> list[str]:
    return sorted(set(re.findall(pattern, PAGE)))


def test_named_files_exist() -> None:
    paths = [path for path in named(r"`([\w/-]+\.(?:py|toml|glsl|comp|md))`") if "NAME" not in path]
    missing = [path for path in paths if not any((ROOT / folder / path).is_file() for folder in FOLDERS)]
    assert paths and not missing


def test_hooks_are_attributes_of_the_decoder() -> None:
    table = PAGE[PAGE.index("| difference | hook |") :]
    hooks = [row.split("|")[2] for row in table.splitlines()[2:] if row.startswith("|")]
    names = {
        name for hook in hooks for name in re.findall(r"`(?:LayerConfig\.)?([a-z_]+)(?: =[^`]*)?`", hook)
    }
    other = {"attn_sinks", "owner"}  # a weight, and a field of KVSpec
    known = set(dir(Decoder)) | set(LayerConfig.__dataclass_fields__) | other
    assert len(names) > 12 and names <= known, names - known


def test_the_picture_matches_its_source() -> None:
    source = (ROOT / "docs" / "architecture.dot").read_text(encoding="utf-8")
    picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    for label in re.findall(r'\[label="([^"]+)"\]', source):
        for line in label.split("\\n"):
            assert re.sub(r"\s+", " ", line) in re.sub(r"(&#160;|\s)+", " ", picture), line


def test_quoted_lines_are_in_their_files() -> None:
    """Each stop quotes at most five lines of its file, in order. `...` marks omitted lines."""
    stops = re.findall(r"^\*\*\d+\. `([\w/.]+)`\*\*.*?\n\n```\w+\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(stops) == 12
    for path, text in stops:
        shown = [line.strip() for line in text.splitlines() if line.strip() != "..."]
        assert 0 < len(shown) <= 5, path
        lines = iter([line.strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()])
        missing = [line for line in shown if line not in lines]
        assert not missing, (path, missing)
