"""The container's packages are locked with hashes and have allowed licences, and the checks can fail."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import ROOT

from vkbackend.tools.checkout import supply_chain
from vkbackend.tools.checkout.supply_chain import BOM, DEPLOY, FAILED, LOCK, NOT_RUN, PASSED, locked

pytestmark = pytest.mark.no_vulkan

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ALLOWED = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MIT-0", "MIT-CMU",
    "MPL-2.0", "PSF-2.0", "Zlib",
}  # fmt: skip
CLASSIFIERS = {  # of packages without an SPDX identifier
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
PACKAGES = locked(LOCK.read_text(encoding="utf-8"))


def wanted() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    names = [*PROJECT["dependencies"], *extras["serve"], *extras["grammar"], "setuptools>=77"]
    return [of for of in map(Requirement, names) if of.name != "vkbackend"]


def test_every_package_is_locked_with_hashes() -> None:
    for requirement in wanted():
        version, hashes = PACKAGES[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement
        assert hashes and len(set(hashes)) == len(hashes), requirement
    assert all(hashes for _, hashes in PACKAGES.values())
    lines = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==\S+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in lines)


def licences(component: dict[str, Any]) -> list[str]:
    """Return the licence expressions of a package: its SPDX identifiers, or its classifiers if it has no SPDX
    identifiers."""
    named = [entry.get("license", entry) for entry in component.get("licenses", ())]
    spdx = [entry.get("id") or entry.get("expression") for entry in named]
    return [*filter(None, spdx)] or [CLASSIFIERS.get(entry["name"], entry["name"]) for entry in named]


def test_the_bill_of_materials_lists_the_lock_with_allowed_licences() -> None:
    text = BOM.read_text(encoding="utf-8")
    components = json.loads(text)["components"]
    listed = {canonicalize_name(component["name"]): component["version"] for component in components}
    assert listed == {name: version for name, (version, _) in PACKAGES.items()}
    for component in components:
        words = [word for of in licences(component) for word in re.split(r" AND | OR |[()]", of) if word]
        assert words and set(words) <= ALLOWED, (component["name"], words)
    assert re.findall(r"https?://[^/\"]+", text) == ["http://cyclonedx.org"]


def test_the_image_installs_only_what_is_locked() -> None:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    assert all((ROOT / path).exists() for path in re.findall(r"^COPY (\S+)", text, re.MULTILINE))
    installs = re.findall(r"pip install ([^&\n]*)", text)
    assert len(installs) == 2
    assert all("--require-hashes" in words or "--no-index --no-deps" in words for words in installs)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_service_is_hardened(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert supply_chain.unit() == PASSED, capsys.readouterr().out
    monkeypatch.setattr(supply_chain, "MOST_EXPOSED", 0.5)
    assert supply_chain.unit() == FAILED


AUDITED = {"name": "a", "version": "1", "vulns": []}
SKIPPED = {"name": "b", "skip_reason": "not found"}
FLAWED = {"name": "c", "version": "1", "vulns": [{"id": "PYSEC-1"}]}


@pytest.mark.parametrize(
    ("packages", "code", "line"),
    [
        ([AUDITED], PASSED, "1 packages audited, 0 vulnerabilities"),
        ([AUDITED, FLAWED], FAILED, "c: PYSEC-1"),
        ([AUDITED, SKIPPED], FAILED, "b: not audited, not found"),
        ([SKIPPED, SKIPPED], NOT_RUN, "not run: the registry here answers no question"),
        (None, NOT_RUN, "not run: the vulnerability data cannot be read (no network)"),
    ],
)
def test_what_an_audit_says(
    packages: Any, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "" if packages is None else json.dumps({"dependencies": packages})
    done = subprocess.CompletedProcess((), 1, text, "no network")
    monkeypatch.setattr(supply_chain, "run", lambda *words: done)
    monkeypatch.setattr(supply_chain, "tool", lambda *words: words)
    assert supply_chain.audit() == code
    assert line in capsys.readouterr().out


@pytest.mark.wide
@pytest.mark.timeout(1800)
def test_the_image_is_built_where_a_builder_runs(capsys: pytest.CaptureFixture[str]) -> None:
    if (code := supply_chain.image()) == NOT_RUN:
        pytest.skip(capsys.readouterr().out)
    assert code == PASSED
