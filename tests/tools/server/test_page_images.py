"""Test images on the page: chosen, dropped and pasted, in the conversation, and after a reload."""

from __future__ import annotations

import base64
import importlib.resources
import re
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from browsers import page_of
from chat_page import ask, send, texts, wait_for
from PIL import Image
from scripted import ScriptedModel
from serving import served

from vkbackend.models.vision.images import image_of_url

pytestmark = pytest.mark.no_vulkan


def png(width: int, height: int) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel(script=lambda messages: ["I see ", str(len(messages))], pictures=object())


@pytest.fixture
def page(opened: Any, model: ScriptedModel) -> Iterator[Any]:
    with served(model) as address, page_of(opened, address.port) as page:
        page.goto("/page/icon.svg")
        page.evaluate("""localStorage.setItem("vkbackend.settings", '{"titles": "off"}')""")
        page.goto("/")
        page.wait_for_selector("#attach:visible")
        yield page


def attach(page: Any, *files: bytes, name: str = "red.png") -> None:
    payloads = [{"name": name, "mimeType": "image/png", "buffer": data} for data in files]
    before = page.locator("#attachments li").count()
    page.set_input_files("#attach-file", payloads)
    wait_for(page, f"document.querySelectorAll('#attachments li').length === {before + len(files)}")


def give(page: Any, event: str, data: bytes, kind: str = "image/png") -> None:
    page.evaluate(
        """([event, data, type]) => {
            const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], "given.png", {type}));
            const options = {bubbles: true, cancelable: true};
            document.querySelector("#input").dispatchEvent(event === "paste"
                ? new ClipboardEvent("paste", {...options, clipboardData: transfer})
                : new DragEvent("drop", {...options, dataTransfer: transfer}));
        }""",
        [event, base64.b64encode(data).decode(), kind],
    )


def sizes(page: Any, selector: str) -> list[int]:
    page.wait_for_selector(selector)
    wait_for(page, f"[...document.querySelectorAll('{selector}')].every((one) => one.complete)")
    return page.evaluate(f"[...document.querySelectorAll('{selector}')].map((one) => one.naturalWidth)")


def test_images_are_sent_shown_and_kept(page: Any, model: ScriptedModel) -> None:
    data = png(40, 20)
    attach(page, data, png(20, 20))
    page.click("#attachments li:nth-child(2) [aria-label='Remove red.png']")
    for n, event in enumerate(("drop", "paste"), 2):
        give(page, event, png(10 * n, 20))
        wait_for(page, f"document.querySelectorAll('#attachments li').length === {n}")
    page.click("#attachments li:nth-child(2) [aria-label='Remove given.png']")
    assert sizes(page, "#attachments img") == [40, 30]
    times = {"decode": 20.0, "preprocess": 30.0, "encode": 450.0}
    model.timings = {f"image_{part}_ms": ms for part, ms in times.items()}
    model.timings |= {"image_n": 2, "image_ms": 500.0, "prompt_ms": 1500.0}
    ask(page, "which color?")
    wait_for(page, "document.querySelector('.assistant .stats').innerText !== ''")  # drawn after the answer
    stats = page.inner_text(".assistant .stats")
    assert "images 0.50 s (decode 0.02 s, preprocess 0.03 s, encode 0.45 s)" in stats
    assert re.search(r"prompt \d+ in 1\.50 s", stats)
    parts = model.asked[-1][-1]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    assert image_of_url("url", parts[0]["image_url"]["url"]).data == data, "small files are unchanged"
    assert not page.is_visible("#attachments") and page.input_value("#input") == ""
    page.reload()
    page.wait_for_selector(".assistant")
    assert texts(page) == ["which color?", "I see 1"] and sizes(page, ".user .images img") == [40, 30]
    ask(page, "again")
    assert [len(message["content"]) for message in model.asked[-1] if message["role"] == "user"] == [3, 5]
    assert "data:" not in page.evaluate("JSON.stringify(localStorage)")


@pytest.mark.wide
def test_an_image_without_a_text_is_a_message(page: Any, model: ScriptedModel) -> None:
    attach(page, png(8, 8))
    ask(page, "")
    assert len(model.asked[-1][-1]["content"]) == 1
    assert page.inner_text("#chats .chat") == "Image"


@pytest.mark.wide
def test_large_images_become_smaller(page: Any, model: ScriptedModel) -> None:
    attach(page, png(4100, 1000))
    ask(page, "wide")
    data = image_of_url("url", model.asked[-1][-1]["content"][0]["image_url"]["url"]).data
    assert isinstance(data, bytes)
    image = Image.open(BytesIO(data))
    assert (image.format, image.size) == ("WEBP", (2048, 500))
    color = np.asarray(image.convert("RGB")).mean((0, 1))
    assert np.abs(color - (200, 30, 30)).max() < 6, "WebP is lossy"


@pytest.mark.wide
def test_files_that_are_no_images(page: Any) -> None:
    page.set_input_files("#attach-file", [{"name": "a.png", "mimeType": "image/png", "buffer": b"no"}])
    page.wait_for_selector("#notice:visible")
    assert page.inner_text("#notice-text") == "a.png is not an image that this browser can read."
    give(page, "drop", b"text", "text/plain")
    assert not page.is_visible("#attachments")


@pytest.mark.wide
def test_unused_and_old_images_are_removed(page: Any) -> None:
    function = """async (limits) => {
        const {ImageStore} = await import("/page/image_store.js");
        const store = new ImageStore(indexedDB);
        const blob = (n) => new Blob([new Uint8Array(n)], {type: "image/png"});
        const ids = [];
        for (const n of [10, 20, 30]) {
            ids.push(await store.add(blob(n)));
            await new Promise((resolve) => setTimeout(resolve, 3));
        }
        await store.clean((id) => id !== ids[1], limits);
        const kept = await Promise.all(ids.map((id) => store.get(id)));
        await store.clean(() => false, {newMs: 0});
        return kept.map((one) => one?.size ?? 0);
    }"""
    assert page.evaluate(function, {}) == [10, 20, 30], "new images remain"
    assert page.evaluate(function, {"newMs": 0}) == [10, 0, 30]
    assert page.evaluate(function, {"newMs": 0, "most": 35}) == [0, 0, 30]


@pytest.mark.wide
def test_a_model_without_vision_has_no_button(opened: Any) -> None:
    with served(ScriptedModel()) as address, page_of(opened, address.port) as page:
        page.goto("/")
        wait_for(page, "document.querySelector('#model').textContent === 'fake'")
        assert not page.is_visible("#attach")
        give(page, "drop", png(8, 8))
        send(page, "x")
        assert not page.is_visible("#attachments")


@pytest.mark.wide
def test_images_are_accessible_and_fit_a_phone(page: Any) -> None:
    package = pytest.importorskip("axe_playwright_python", reason="needs axe-core: pip install -e .[browser]")
    page.set_viewport_size({"width": 360, "height": 640})
    attach(page, png(1600, 300))
    ask(page, "wide")
    attach(page, *[png(300, 300)] * 6)
    sizes(page, ".user .images img")
    overflow = "document.scrollingElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0
    page.evaluate(
        (importlib.resources.files(package) / "axe.min.js").read_text(encoding="utf-8") + "; undefined"
    )
    violations = page.evaluate("""async () => {
        const {violations} = await axe.run(document, {resultTypes: ["violations"]});
        return violations.filter((one) => ["serious", "critical"].includes(one.impact)).map((one) => one.id);
    }""")
    assert violations == []
