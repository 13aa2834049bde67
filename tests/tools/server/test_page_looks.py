from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator
from typing import Any

import pytest
from browsers import page_of
from chat_page import ask, send, texts, wait_for
from serving import Address

pytestmark = pytest.mark.no_vulkan

N_LONG = 120  # number of messages, many more than fit into the window
OVERFLOW = "document.scrollingElement.scrollWidth - document.documentElement.clientWidth"


def brightness(page: Any, selector: str) -> int:
    color = page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).backgroundColor")
    parts = [int(part) for part in color.split("(")[1].rstrip(")").split(",")[:3]]
    return sum(parts) // 3


def long_chat(n: int) -> dict[str, Any]:
    nodes: dict[str, Any] = {"": {"children": ["m0"], "chosen": 0, "content": ""}}
    for i in range(n):
        nodes[f"m{i}"] = {
            "children": [f"m{i + 1}"] if i + 1 < n else [],
            "chosen": 0,
            "role": "assistant" if i % 2 else "user",
            "content": f"Message *{i}*.\n\n- one\n- two\n\n```\nprint({i})\n```"
            if i % 2
            else f"Question {i}",
        }
    return {"id": "c" * 24, "title": "long", "system": "", "created": 1, "updated": 1, "nodes": nodes}


@pytest.fixture
def long_page(page: Any) -> Any:
    chat = long_chat(N_LONG)
    page.evaluate("([key, value]) => localStorage.setItem(key, value)",
                  [f"vkbackend.chat.{chat['id']}", json.dumps(chat)])  # fmt: skip
    page.goto("/page/icon.svg")
    page.goto(f"/#{chat['id']}")
    page.wait_for_selector(f"#messages article:nth-child({N_LONG})")
    return page


def test_old_messages_are_unchanged_when_a_message_is_added(long_page: Any) -> None:
    """Long conversations would be slow if the page created old messages again."""
    page = long_page
    page.evaluate("""() => {
        window.touched = 0;
        const old = new Set(document.querySelectorAll("#messages article"));
        const isOld = (node) => old.has(node) || old.has(node.parentElement?.closest("article"));
        new MutationObserver((records) => {
            for (const { target, removedNodes } of records) {
                if (isOld(target) || [...removedNodes].some(isOld)) window.touched++;
            }
        }).observe(document.querySelector("#messages"),
            { subtree: true, childList: true, attributes: true, characterData: true });
    }""")
    ask(page, "long")
    assert page.locator("#messages article").count() == N_LONG + 2
    assert page.evaluate("window.touched") == 0
    assert page.evaluate("getComputedStyle(document.querySelector('article')).contentVisibility") == "auto"
    wait_for(
        page,
        """(() => {
        const { scrollHeight, scrollTop, clientHeight } = document.querySelector("#scroller");
        return scrollHeight - scrollTop - clientHeight < 90;
    })()""",
    )  # the page has scrolled to the end of the answer


def test_the_view_does_not_move_after_scrolling_up(long_page: Any) -> None:
    page = long_page
    page.evaluate("document.querySelector('#scroller').scrollTop = 0")
    page.wait_for_selector("#to-end:visible")
    page.locator("#messages article").nth(1).locator("button", has_text="Regenerate").click()
    page.wait_for_selector("#send:visible")
    assert page.locator("#messages article").count() == 2  # the other branch has all messages
    page.click("[aria-label='Earlier version']:visible")
    assert page.locator("#messages article").count() == N_LONG
    assert page.evaluate("document.querySelector('#scroller').scrollTop") < 200
    page.wait_for_selector("#to-end:visible")
    page.click("#to-end")
    page.wait_for_selector("#to-end", state="hidden")


def test_dark_by_the_system_and_by_the_switch(page: Any) -> None:
    page.emulate_media(color_scheme="dark")
    assert brightness(page, "body") < 60
    page.click("#theme")
    assert brightness(page, "body") > 200
    page.reload()
    assert brightness(page, "body") > 200  # the page stores the chosen theme
    page.click("#theme")
    page.emulate_media(color_scheme="light")
    assert brightness(page, "body") < 60
    page.click("#theme")
    assert brightness(page, "body") > 200


@pytest.fixture(scope="module")
def phone(opened: Any, address: Address) -> Iterator[Any]:
    with page_of(opened, address.port, width=360, height=640, has_touch=True) as page:
        page.goto("/")
        yield page


@pytest.mark.wide
def test_a_phone_never_scrolls_sideways(phone: Any) -> None:
    assert phone.evaluate(OVERFLOW) == 0
    ask(phone, "wide")
    ask(phone, "z" * 200)
    ask(phone, "formatted")
    wait_for(phone, "document.querySelector('.assistant math')")
    phone.click(".assistant:last-child >> text=Regenerate")
    phone.click(".assistant:last-child .compare:visible")
    assert phone.evaluate(OVERFLOW) == 0
    box = phone.locator("#version-list section").first.bounding_box()
    assert box["width"] < 330  # the edge of the second version is visible
    phone.click("[aria-label='Close the versions']")
    assert phone.evaluate(OVERFLOW) == 0
    assert phone.evaluate("document.querySelector('#scroller').scrollWidth <= 360")
    assert not phone.is_visible("#search")
    phone.click("#menu")
    assert phone.is_visible("#search") and phone.get_attribute("#menu", "aria-expanded") == "true"
    phone.click("#new")
    assert not phone.is_visible("#search") and not texts(phone)
    for opener, closer in (
        ("#open-settings", "#settings [type=submit]"),
        ("#toggle-devices", "#close-devices"),
    ):
        phone.click(opener)
        assert phone.evaluate(OVERFLOW) == 0
        phone.click(closer)
    send_box = phone.locator("#send").bounding_box()
    assert send_box["x"] + send_box["width"] <= 360 and send_box["y"] + send_box["height"] <= 640


def test_devices(page: Any) -> None:
    page.click("#toggle-devices")
    page.wait_for_selector(".device")
    assert page.locator(".device h3").all_inner_texts() == ["0 · card A", "1 · card B"]
    assert page.locator(".share span").all_inner_texts() == ["75 % of the weights", "25 % of the weights"]
    rows = page.locator("#engine div").all_inner_texts()
    assert ["per reduce", "42 µs"] in [row.split("\n") for row in rows]  # noqa: RUF001
    assert page.locator(".device").first.locator(".sum td").inner_text() == "4.0 MiB"
    page.keyboard.press("Alt+g")
    assert not page.is_visible("#devices")


def test_keyboard(page: Any) -> None:
    ask(page, "hello")
    page.keyboard.press("Alt+r")
    page.wait_for_selector(".counter:visible")
    page.wait_for_selector("#send:visible")
    page.keyboard.press("Alt+u")
    assert page.evaluate("document.activeElement.ariaLabel") == "Edit the message"
    page.keyboard.press("Escape")
    assert not page.is_visible(".edit")
    page.focus(".compare:visible")
    page.keyboard.press("Enter")
    assert page.is_visible("#versions")
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+/")
    assert page.is_visible("#shortcuts") and "Shift Enter" in page.inner_text("#shortcuts")
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+k")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.press("Alt+n")
    assert page.evaluate("document.activeElement.id") == "input" and not texts(page)
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#input") == "one\ntwo"
    page.evaluate("""document.querySelector("#input").dispatchEvent(
        new KeyboardEvent("keydown", { key: "Enter", isComposing: true, bubbles: true }))""")
    assert not texts(page)  # this Enter only commits an IME composition


AXE = """async (part) => {
    const found = await axe.run(part ?? document, { resultTypes: ["violations"] });
    return found.violations.filter((one) => ["serious", "critical"].includes(one.impact))
        .map((one) => one.id + ": " + one.nodes.map((node) => node.html.slice(0, 150)).join(" | "));
}"""


@pytest.mark.wide
def test_axe_finds_nothing_serious(page: Any) -> None:
    package = pytest.importorskip("axe_playwright_python", reason="needs axe-core: pip install -e .[browser]")
    page.evaluate(
        (importlib.resources.files(package) / "axe.min.js").read_text(encoding="utf-8") + "; undefined"
    )
    assert page.evaluate(AXE) == []
    for text in ("long", "think", "call", "wide"):
        ask(page, text)
    page.set_viewport_size({"width": 1280, "height": 3000})
    ask(page, "formatted")
    wait_for(page, "document.querySelector('.c-keyword') && document.querySelector('math')")
    ask(page, "word " * 1000)
    page.click(".assistant:last-child >> text=Regenerate")
    page.click(".assistant:last-child .compare:visible")
    assert page.evaluate(AXE, "#versions") == []
    page.keyboard.press("Escape")
    send(page, "wait")
    wait_for(page, "document.querySelector('article:last-child > .body').textContent")
    page.click("#stop")
    page.wait_for_selector(".stopped:visible")
    send(page, "wait")
    page.click("#toggle-devices")
    page.wait_for_selector(".device")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(AXE) == [], scheme
    page.keyboard.press("Escape")
    page.click("#open-settings")
    page.click("#settings summary")
    assert page.evaluate(AXE, "#settings") == []
    page.emulate_media(color_scheme="light")
    assert page.evaluate(AXE, "#settings") == []
    page.set_viewport_size({"width": 1280, "height": 800})
