"""Fixtures that open a browser, and a server with a scripted model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browsers import browser, page_of
from javascript import Run, runner
from page_answers import script
from scripted import ScriptedModel
from serving import Address, served


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with runner(tmp_path_factory.mktemp("page")) as run_module:
        yield run_module


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    """Yield one browser per module, because no test can run its own event loop while playwright runs."""
    with browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def model() -> ScriptedModel:
    return ScriptedModel(script=script, pause_s=0.002)


@pytest.fixture(scope="module")
def address(model: ScriptedModel) -> Iterator[Address]:
    with served(model) as address:
        yield address


@pytest.fixture(scope="module")
def shared_page(opened: Any, address: Address) -> Iterator[Any]:
    with page_of(opened, address.port) as page:
        page.goto("/page/icon.svg")  # this file has the page's origin, but does not load the page's modules
        yield page


@pytest.fixture
def page(shared_page: Any) -> Iterator[Any]:
    """Yield the page with empty storage. A new profile per test would take a second. The model writes no
    titles, because tests look at its last request."""
    shared_page.evaluate("localStorage.clear(), sessionStorage.clear()")
    shared_page.evaluate("""localStorage.setItem("vkbackend.settings", '{"titles": "off"}')""")
    shared_page.goto("/")
    yield shared_page
    shared_page.goto("/page/icon.svg")
