"""Opens Chromium with playwright for tests of the page. If something is missing, the test is skipped with a
message that names it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# Debian's headless shell takes half of Chromium's CPU time (12.5 s instead of 23 s for test_page.py), because
# Chromium draws a hidden window.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextmanager
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e .[browser]")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"needs a browser on the PATH: one of {', '.join(NAMES)}")
    # --disable-gpu makes Chromium draw in software. Chromium's sandbox does not work as root.
    flags = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=flags)
        yield opened
        opened.close()


@contextmanager
def page_of(opened: Any, port: int, width: int = 1280, height: int = 800, **options: Any) -> Iterator[Any]:
    """Open a page in a fresh profile. Fail if the page contacts another server, throws an exception, or
    violates its content security policy."""
    address = f"http://127.0.0.1:{port}/"
    wrong: list[str] = []
    viewport = {"width": width, "height": height}
    context = opened.new_context(viewport=viewport, base_url=address, **options)
    context.set_default_timeout(30_000)
    context.on("request", lambda request: note_elsewhere(request.url, address, wrong))
    page = context.new_page()
    page.on("pageerror", lambda error: wrong.append(f"thrown: {error}"))
    page.on("console", lambda line: note_console(line, wrong))
    try:
        yield page
        assert not wrong, wrong
    finally:
        context.close()


def note_elsewhere(url: str, address: str, wrong: list[str]) -> None:
    if not url.startswith((address, "blob:", "data:")):
        wrong.append(f"asked {url}")


def note_console(line: Any, wrong: list[str]) -> None:
    if line.type == "error" and "Failed to load resource" not in line.text:
        wrong.append(line.text)
