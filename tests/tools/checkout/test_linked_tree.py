from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vkbackend.tools.checkout.linked_tree import ROOT, link

pytestmark = pytest.mark.no_vulkan


def test_the_links_have_the_layout_of_an_installed_package(tmp_path: Path) -> None:
    link(tmp_path / "tree")
    link(tmp_path / "tree")  # replaces its own folder
    assert (tmp_path / "tree/vkbackend/meta/split.py").resolve() == ROOT / "meta/split.py"


def test_a_folder_with_other_files_is_kept(tmp_path: Path) -> None:
    (note := tmp_path / "note.txt").write_text("mine", encoding="utf-8")
    command = [sys.executable, "-m", "vkbackend.tools.checkout.linked_tree", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 1 and f"error: {note} is not a link" in done.stderr
    assert note.read_text(encoding="utf-8") == "mine"
