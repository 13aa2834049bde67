"""Functions that act on the chat page."""

from __future__ import annotations

from typing import Any

from serving import until


def wait_for(page: Any, expression: str) -> None:
    """Wait until the JavaScript expression is true. playwright's own function needs eval, which the page's
    policy forbids."""
    until(lambda: bool(page.evaluate(expression)))


def send(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def ask(page: Any, text: str) -> None:
    send(page, text)
    page.wait_for_selector("#send:visible")


def texts(page: Any) -> list[str]:
    return [body.text_content() for body in page.query_selector_all(".message > .body")]


def foot(page: Any, index: int, name: str) -> None:
    page.locator(".message").nth(index).locator(".foot button", has_text=name).click()
