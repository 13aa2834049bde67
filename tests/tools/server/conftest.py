"""Fixtures that open a browser, and a server with a scripted model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from browsers import browser, page_of
from javascript import Run, runner
from scripted import Messages, Piece, ScriptedModel, Thought, Wait
from serving import Address, served

from vkbackend.errors import DeadlineExceeded
from vkbackend.models.tool_calls.source import ToolDelta

LONG = [
    "One *fine*",
    " day.\n\n",
    "```py\nprint",
    "(1)\n```\n\n",
    *[f"word{i} " for i in range(60)],
    "\n\nEnd.",
]
HOSTILE = (
    "<script>window.pwned = 1</script> <img src=x onerror='window.pwned = 1'> "
    "![i](http://elsewhere.example/a.png) [x](javascript:window.pwned=1) [y](https://elsewhere.example/)\n\n<style>*{display:none}</style>\n\n"
    "```<b>\n</code><script>window.pwned = 1</script>\n```\n"
)
TABLE = "|" + "head |" * 20 + "\n|" + "-|" * 20 + "\n|" + "cell |" * 20
WIDE = "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n\n" + TABLE
ANSWERS: dict[str, Sequence[Piece]] = {
    "long": LONG,
    "wait": ["one ", "two", Wait()],
    "hostile": [HOSTILE],
    "wide": [WIDE],
    "think": [Thought("Let me "), Thought("see."), "Done."],
    "refused": [DeadlineExceeded("too late")],
    "half": ["half ", "an answer", DeadlineExceeded("too late")],
    "call": [ToolDelta(0, "c1", "weather", '{"place":'), ToolDelta(0, None, None, ' "Oslo"}')],
}


def script(messages: Messages) -> Sequence[Piece]:
    last = messages[-1]
    if last["role"] == "tool":
        return [f"It is {last['content']}."]
    return ANSWERS.get(str(last["content"]), ["You said ", f"**{last['content']}**."])


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
        page.goto("/page/icon.svg")  # this file has the page's origin but loads none of its modules
        yield page


@pytest.fixture
def page(shared_page: Any) -> Iterator[Any]:
    """Yield the page with empty storage. A new profile per test would take a second."""
    shared_page.evaluate("localStorage.clear(), sessionStorage.clear()")
    shared_page.goto("/")
    yield shared_page
    shared_page.goto("/page/icon.svg")
