"""Locks the packages of the container, and checks the files in docs/deploy. Needs the extra `supply`.

    python -m vkbackend.tools.checkout.supply_chain lock    # docs/deploy/requirements.txt, with hashes
    python -m vkbackend.tools.checkout.supply_chain bom     # docs/deploy/bom.json: versions and licences
    python -m vkbackend.tools.checkout.supply_chain audit   # known vulnerabilities of the locked packages
    python -m vkbackend.tools.checkout.supply_chain image   # builds docs/deploy/Containerfile
    python -m vkbackend.tools.checkout.supply_chain unit    # rates docs/deploy/vkbackend.service

Exit codes: 0 passed, 1 failed, 3 the check cannot run here, for the reason that is printed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs" / "deploy"
LOCK, BOM, UNIT = DEPLOY / "requirements.txt", DEPLOY / "bom.json", DEPLOY / "vkbackend.service"
PYTHON = "3.13"  # the version of Debian 13, the image's base
PLATFORM = "x86_64-manylinux_2_40"
BUILD = "setuptools>=77\n"  # builds the wheel of this project in the image
BUILDERS = ("podman", "buildah", "docker")
MOST_EXPOSED = 2.0  # of 10, systemd-analyze's scale
PASSED, FAILED, NOT_RUN = 0, 1, 3

LOCK_HEAD = """\
# The packages of the container, with their hashes. Written by
# `python -m vkbackend.tools.checkout.supply_chain lock`; install them with `pip install --require-hashes`.
"""


def run(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    # uv reads the certificates that pip is set up with.
    environ = {"SSL_CERT_FILE": cert} if (cert := os.environ.get("PIP_CERT")) else {}
    return subprocess.run(
        words, capture_output=True, encoding="utf-8", cwd=ROOT, env=os.environ | environ, **how
    )


def tool(name: str, *words: str) -> tuple[str, ...]:
    beside = Path(sys.executable).parent / name
    if not beside.exists():
        sys.exit(f"{name} is missing; install the extra: pip install -e '.[supply]'")
    return str(beside), *words


def fail(done: subprocess.CompletedProcess[str]) -> int:
    print((done.stderr or done.stdout).strip())
    return FAILED


def locked(text: str) -> dict[str, tuple[str, list[str]]]:
    """Return {package: (version, hashes)} of a requirements file."""
    packages = {}
    for entry in re.sub(r"\\\n", " ", text).splitlines():
        if match := re.match(r"([\w.-]+)==(\S+)", entry):
            packages[match[1].lower()] = match[2], re.findall(r"--hash=sha256:([0-9a-f]{64})\b", entry)
    return packages


def lock() -> int:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".in") as build:
        build.write(BUILD)
        build.flush()
        done = run(
            *tool("uv", "pip", "compile", "pyproject.toml", build.name, "--extra", "serve", "--upgrade"),
            *("--generate-hashes", "--python-version", PYTHON, "--python-platform", PLATFORM),
            *("--no-header", "--no-annotate", "--no-emit-index-url", "--only-binary", ":all:", "--quiet"),
        )  # fmt: skip
    if done.returncode:
        return fail(done)
    LOCK.write_text(LOCK_HEAD + done.stdout, encoding="utf-8")
    print(f"{LOCK.relative_to(ROOT)}: {len(locked(done.stdout))} packages")
    return bom()


def bom() -> int:
    """List the locked packages as CycloneDX, without their web addresses. The packages are installed with
    their hashes into a temporary environment."""
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/venv/bin/python"
        for command in (
            tool("uv", "venv", "--quiet", f"{folder}/venv"),
            tool("uv", "pip", "install", "--quiet", "--python", python, "--python-version", PYTHON,
                 "--python-platform", PLATFORM, "--require-hashes", "--no-deps", "--only-binary", ":all:",
                 "--requirement", str(LOCK)),
            tool("cyclonedx-py", "environment", "--output-reproducible", "--output-format", "JSON",
                 "--output-file", f"{folder}/bom.json", python),
        ):  # fmt: skip
            if (done := run(*command)).returncode:
                return fail(done)
        listed = json.loads(Path(folder, "bom.json").read_text(encoding="utf-8"))
    for component in listed["components"]:
        component.pop("externalReferences", None)
    listed["metadata"].pop("tools", None)
    BOM.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    print(f"{BOM.relative_to(ROOT)}: {len(listed['components'])} packages")
    return PASSED


def audit() -> int:
    done = run(
        *tool("pip-audit", "--disable-pip", "--require-hashes", "--requirement", str(LOCK)),
        *("--format", "json", "--progress-spinner", "off"),
    )
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"not run: the vulnerability data cannot be read ({last})")
        return NOT_RUN
    skipped = [package for package in packages if "skip_reason" in package]
    if packages and len(skipped) == len(packages):
        print("not run: the registry here answers no question about vulnerabilities, for any package")
        return NOT_RUN
    known = [(package["name"], flaw["id"]) for package in packages for flaw in package.get("vulns", ())]
    for name, flaw in known:
        print(f"{name}: {flaw}")
    for package in skipped:
        print(f"{package['name']}: not audited, {package['skip_reason']}")
    print(f"{len(packages) - len(skipped)} packages audited, {len(known)} vulnerabilities")
    return FAILED if known or skipped else PASSED


def image() -> int:
    reasons = []
    for builder in BUILDERS:
        if shutil.which(builder) is None:
            reasons.append(f"{builder} is not installed")
        elif (asked := run(builder, "info")).returncode:
            reasons.append(f"{builder}: {(asked.stderr.strip().splitlines() or ['no answer'])[-1]}")
        else:
            done = run(builder, "build", "-f", str(DEPLOY / "Containerfile"), "-t", "vkbackend", str(ROOT))
            return fail(done) if done.returncode else PASSED
    print(f"not run: no builder of images: {'; '.join(reasons)}")
    return NOT_RUN


def unit() -> int:
    if shutil.which("systemd-analyze") is None:
        print("not run: systemd-analyze is not installed")
        return NOT_RUN
    done = run("systemd-analyze", "security", "--offline=true", "--no-pager", str(UNIT))
    match = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    if not match:
        return fail(done)
    print(f"{UNIT.name}: exposure {match[1]} of 10, at most {MOST_EXPOSED}")
    return PASSED if float(match[1]) <= MOST_EXPOSED else FAILED


CHECKS = {check.__name__: check for check in (lock, bom, audit, image, unit)}


def main(words: Sequence[str]) -> int:
    if len(words) != 1 or words[0] not in CHECKS:
        print(__doc__)
        return 2
    return CHECKS[words[0]]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
