"""The page chooses among several models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browsers import browser, page_of
from chat_page import ask, send, texts, wait_for
from pools import FakeMachine, entry
from scripted import ScriptedModel
from serving import Address, front_served

from vkbackend.errors import GGUFError
from vkbackend.meta.load import Progress
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.router.places import Place
from vkbackend.tools.server.router.pool import Pool, PoolSettings
from vkbackend.tools.server.router.registry import Entry
from vkbackend.tools.server.router.router import Router

pytestmark = [pytest.mark.no_vulkan, pytest.mark.usefixtures("no_collection")]

TITLE = "Write a title"


class Machine(FakeMachine):
    def open(self, wanted: Entry, place: Place, progress: Progress) -> Any:
        super().open(wanted, place, progress)

        def script(messages: list[dict[str, Any]]) -> list[str]:
            is_title = str(messages[-1]["content"]).startswith(TITLE)
            return [f"Title of {wanted.name}" if is_title else f"I am {wanted.name}."]

        return ScriptedModel(script=script, n_ctx=100 if wanted.name == "small" else 200)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine(shut={"small"}, errors={"broken": [GGUFError("/models/broken.gguf is cut")] * 9})


@pytest.fixture(scope="module")
def address(machine: Machine) -> Iterator[Address]:
    entries = [entry("large"), entry("small"), entry("broken")]
    pool = Pool(entries, machine.plan, machine.open, {"gpu": 9}, PoolSettings())
    with front_served(
        Router(Config("models", "models", logs_requests=False), pool, lambda: (entries, []))
    ) as at:
        yield at


@pytest.fixture(scope="module")
def page(address: Address) -> Iterator[Any]:
    with browser() as opened, page_of(opened, address.port) as page:
        yield page


def options(page: Any) -> list[str]:
    return page.evaluate("[...document.getElementById('models').options].map((one) => one.textContent)")


def test_a_model_is_chosen_loaded_and_asked(page: Any, address: Address, machine: Machine) -> None:
    page.goto("/")
    page.wait_for_selector("#models:visible")
    assert options(page) == ["large", "small", "broken"] and not page.is_visible("#context")
    ask(page, "who?")
    assert texts(page)[-1] == "I am large."
    wait_for(page, "document.getElementById('models').options[0].textContent === 'large (loaded)'")
    wait_for(page, "document.querySelector('#context span').textContent.endsWith('/ 200')")
    wait_for(page, "document.getElementById('title').textContent === 'Title of large'")
    page.select_option("#models", "small")
    send(page, "and who are you?")
    wait_for(page, "document.getElementById('models').options[1].textContent === 'small (loading 50 %)'")
    machine.gate.set()
    page.wait_for_selector("#send:visible")
    assert texts(page)[-1] == "I am small."
    wait_for(page, "document.querySelector('#context span').textContent.endsWith('/ 100')")
    page.click("#toggle-devices")
    page.wait_for_selector("#device-list h3")
    assert page.inner_text("#devices-error") == ""
    page.reload()
    wait_for(page, "document.getElementById('models').value === 'small'")


def test_a_model_that_cannot_be_loaded_says_why(page: Any) -> None:
    page.select_option("#models", "broken")
    ask(page, "who?")
    assert "broken cannot be loaded: broken.gguf is cut" in page.inner_text(".assistant:last-child .error")
    wait_for(page, "document.getElementById('models').options[2].textContent === 'broken (failed)'")
    assert page.get_attribute("#models", "title") == "broken.gguf is cut"
    assert page.input_value("#models") == "broken"
