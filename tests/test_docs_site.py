"""All pages of the documentation are in the site, links resolve, and the reference contains the public
names."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from places import ROOT

import vkbackend

pytestmark = pytest.mark.no_vulkan

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
NAV = re.findall(r"^ +- .*?: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
CLASSES = ["LLM", "Chat", "Completion", "Chunk"]


def prose(path: Path) -> str:
    return re.sub(r"(?ms)^```.*?^```$|^    .*?$|`[^`\n]*`", "", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Return the link targets of a page, which GitHub and the site derive from its headings."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"(?ms)^```.*?^```$", "", path.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            broken.append(f"{path}: {link}: there is nothing")
        elif DOCS in path.parents and not target.is_relative_to(DOCS):
            broken.append(f"{path}: {link}: the site has the pages of docs/ alone")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{path}: {link}: the page has no such heading")
    return broken


def test_links_resolve() -> None:
    assert not [link for path in (*OUTSIDE, *PAGES) for link in broken_links(path)]


def test_a_broken_link_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n[here](#a-heading) [there](#another) [file](absent.md) [web](https://x.org)\n",
        encoding="utf-8",
    )
    assert [line.split(": ")[1] for line in broken_links(page)] == ["#another", "absent.md"]


def test_every_page_is_in_the_site_once() -> None:
    assert sorted(NAV) == [str(path.relative_to(DOCS)) for path in PAGES]


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    directives = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    assert {f"vkbackend.{name}" for name in CLASSES} <= directives
    errors = {name for name in vkbackend.__all__ if hasattr(vkbackend.errors, name)}
    assert errors | set(CLASSES) == set(vkbackend.__all__) and "vkbackend.errors" in directives


def public_members() -> list[str]:
    """`Class.method`, including inherited methods."""
    members = []
    for name in CLASSES:
        class_ = getattr(vkbackend, name)
        for member, value in inspect.getmembers_static(class_):
            is_method = isinstance(value, property | classmethod | staticmethod) or callable(value)
            if is_method and not member.startswith("_"):
                members.append(f"{name}.{member}")
    return members


def test_every_public_method_has_a_docstring() -> None:
    """The reference omits methods that have no docstring."""
    members = [member.split(".") for member in public_members()]
    assert not [
        f"{class_}.{name}"
        for class_, name in members
        if not inspect.getdoc(getattr(getattr(vkbackend, class_), name))
    ]


@pytest.mark.skipif(find_spec("zensical") is None, reason="needs the extra docs")
def test_the_site_is_built_without_a_warning() -> None:
    # The generator's own files are opened without an encoding.
    variables = {"PYTHON": sys.executable, "PYTHONWARNDEFAULTENCODING": ""}
    done = subprocess.run(
        ["bash", "tools/docs.sh"], cwd=ROOT, env={**os.environ, **variables},
        capture_output=True, text=True, encoding="utf-8", timeout=110,
    )  # fmt: skip
    assert done.returncode == 0 and "Warning" not in done.stdout + done.stderr, done.stdout + done.stderr
    reference = "".join(
        page.read_text(encoding="utf-8") for page in (ROOT / "build/site/reference").glob("*.html")
    )
    missing = [member for member in public_members() if f'id="vkbackend.{member}"' not in reference]
    missing += [
        name for name in vkbackend.__all__ if not re.search(rf'id="vkbackend\.(errors\.)?{name}"', reference)
    ]
    assert not missing
