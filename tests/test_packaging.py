from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from places import ROOT

import vkbackend

pytestmark = pytest.mark.no_vulkan

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS_OF_WORK = {"test", "clients", "train", "oracles", "plot", "browser", "docs", "supply"}


@pytest.mark.parametrize("system", ["darwin", "freebsd14"])
def test_other_systems_are_refused_in_one_line(system: str) -> None:
    code = f"import sys; sys.platform = {system!r}; import vkbackend"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", timeout=60
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(
        "vkbackend.errors.UnsupportedPlatform: vkbackend needs Linux or Windows, and this is " + repr(system)
    )
    assert "Operating System :: POSIX :: Linux" in PROJECT["classifiers"]


def test_an_import_that_fails_is_an_import_error() -> None:
    assert issubclass(vkbackend.UnsupportedPlatform, ImportError)
    assert issubclass(vkbackend.UnsupportedPlatform, vkbackend.VkbackendError)


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == vkbackend.__version__
    versions = re.findall(
        r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert versions[0] == "Unreleased" or versions[0] == vkbackend.__version__


def test_every_dependency_has_its_licence_listed() -> None:
    lists = [PROJECT["dependencies"]]
    lists += [
        names for extra, names in PROJECT["optional-dependencies"].items() if extra not in EXTRAS_OF_WORK
    ]
    wanted = {re.split(r"[\[<>=,\s]", name)[0] for names in lists for name in names} - {"vkbackend"}
    rows = set(
        re.findall(
            r"^\| `([\w-]+)` \|", (ROOT / "docs" / "licences.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert wanted <= rows, wanted - rows
