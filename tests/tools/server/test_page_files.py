from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch

import pytest
from places import ROOT
from serving import FakeModel, served

from vkbackend.tools.server.front import Config
from vkbackend.tools.server.guard import Guard
from vkbackend.tools.server.static import CSP, FILES, FOLDER, TYPES

pytestmark = pytest.mark.no_vulkan


def test_files_are_sent_with_their_policy_and_without_a_key() -> None:
    with served(FakeModel(), Config("fake.gguf", "fake", guard=Guard(("secret",)))) as address:
        for path, file in FILES.items():
            status, text, headers = address.get(path)
            assert (status, text) == (200, file.read_text(encoding="utf-8"))
            assert (
                headers["content-type"] == TYPES[file.suffix]
                and headers["x-content-type-options"] == "nosniff"
            )
            assert headers["content-security-policy"] == CSP.decode()
            assert address.request("GET", path, headers={"if-none-match": headers["etag"]})[0] == 304
        assert address.get("/?q=hello")[0] == 200
        # a client without a key must not learn which files exist
        assert address.get("/page/none.js")[0] == 401
        assert address.get("/page/none.js", authorization="Bearer secret")[0] == 404
        for path in ("/page/../static.py", "/page/%2e%2e/static.py", "/page/..%2fstatic.py", "/page"):
            assert address.get(path, authorization="Bearer secret")[0] == 404, path
        assert address.post("/", {})[0] == 405


def test_the_wheel_has_all_files() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-data"
    ]
    names = [f"page/{file.relative_to(FOLDER)}" for file in FOLDER.rglob("*") if file.is_file()]
    assert "page/index.html" in names and "page/vendor/temml.LICENSE" in names
    assert len(set(FILES.values())) == len([name for name in names if not name.endswith(".LICENSE")])
    assert all(any(fnmatch(name, pattern) for pattern in data["vkbackend.tools.server"]) for name in names)


WRITTEN_HERE = [file for file in sorted(set(FILES.values())) if file.parent.name != "vendor"]


@pytest.mark.parametrize("file", WRITTEN_HERE, ids=lambda file: file.name)
def test_files_neither_make_html_of_texts_nor_name_other_sites(file: object) -> None:
    text = file.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
    )
    # the content security policy forbids inline styles and handlers
    assert not re.search(r"<[^>]*\s(style|on\w+)=", text)
    sites = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}  # namespaces
    assert not sites
