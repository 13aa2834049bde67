"""The page sends no request to other servers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from browsers import page_of
from chat_page import ask, foot, send, texts, wait_for
from scripted import ScriptedModel
from serving import served, until

from vkbackend.tools.server.front import Config
from vkbackend.tools.server.guard import Guard

pytestmark = pytest.mark.no_vulkan


def test_send_stream_and_timings(page: Any, model: ScriptedModel) -> None:
    ask(page, "hello")
    assert texts(page) == ["hello", "You said hello."]
    assert page.inner_text(".assistant > .body strong") == "hello"
    assert "123 tokens/s" in page.inner_text(".assistant .stats")
    # the context has 5 prompt tokens and 2 generated tokens
    assert page.inner_text("#context span") == "7 / 512"
    ask(page, "more")
    assert [message["content"] for message in model.asked[-1]] == ["hello", "You said **hello**.", "more"]
    assert page.inner_text("#chats .chat") == "hello" == page.inner_text("#title")


def test_settled_blocks_are_unchanged_while_the_last_block_grows(page: Any) -> None:
    send(page, "long")
    page.wait_for_selector(".assistant .code")
    page.evaluate("document.querySelector('.assistant > .body p').mark = 1")
    page.wait_for_selector("#send:visible")
    assert page.evaluate("document.querySelector('.assistant > .body p').mark") == 1
    assert page.inner_text(".assistant pre") == "print(1)"
    assert page.locator(".assistant > .body > *").count() == 4
    said = page.text_content("#announcements")
    # a screen reader must read each text only once
    assert said.count("One fine day.") == 1 and said.count("End.") == 1


def test_stop_keeps_the_text_so_far(page: Any, model: ScriptedModel) -> None:
    send(page, "wait")
    wait_for(page, "document.querySelector('.assistant > .body').textContent === 'one two'")
    assert not page.is_visible("#send") and model.active == 1
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    until(lambda: model.active == 0)
    assert texts(page) == ["wait", "one two"]
    assert not page.is_visible(".error")


def test_edit_regenerate_and_branches(page: Any) -> None:
    ask(page, "first")
    ask(page, "second")
    foot(page, 0, "Edit")
    page.fill(".edit textarea", "other")
    page.press(".edit textarea", "Enter")
    page.wait_for_selector("#send:visible")
    assert texts(page) == ["other", "You said other."]
    assert page.inner_text(".user .counter") == "2/2"
    foot(page, 1, "Regenerate")
    page.wait_for_selector(".assistant .counter:visible")
    page.wait_for_selector("#send:visible")
    assert page.inner_text(".assistant .counter") == "2/2"
    page.click(".user [aria-label='Earlier version']")
    assert texts(page) == ["first", "You said first.", "second", "You said second."]
    assert page.is_disabled(".user [aria-label='Earlier version']")
    page.reload()
    page.wait_for_selector(".message")
    assert texts(page) == ["first", "You said first.", "second", "You said second."]
    page.click(".user [aria-label='Later version']")
    assert texts(page) == ["other", "You said other."] and page.inner_text(".assistant .counter") == "2/2"
    foot(page, 0, "Delete")
    assert texts(page)[0] == "first" and not page.is_visible(".user .counter")


def test_an_answer_cannot_be_html(page: Any) -> None:
    ask(page, "hostile")
    body = page.locator(".assistant > .body")
    assert "<script>window.pwned = 1</script> <img src=x" in body.inner_text()
    assert page.evaluate("window.pwned") is None
    assert body.locator("script, img, style, b").count() == 0
    links = [(link.get_attribute("href"), link.get_attribute("rel")) for link in body.locator("a").all()]
    rel = "noopener noreferrer"
    assert links == [("http://elsewhere.example/a.png", rel), ("https://elsewhere.example/", rel)]
    foot(page, 0, "Edit")  # a user's message is not rendered as Markdown
    page.fill(".edit textarea", "<img src=x onerror='window.pwned = 1'>")
    page.click(".edit [type=submit]")
    page.wait_for_selector("#send:visible")
    assert page.locator(".message img, #sidebar img").count() == 0


def test_thoughts_and_calls(page: Any, model: ScriptedModel) -> None:
    ask(page, "think")
    assert not page.is_visible(".thinking .body")
    page.click(".thinking:visible summary")
    assert page.inner_text(".thinking[open] .body") == "Let me see."
    ask(page, "call")
    assert page.inner_text(".call p") == "Calls weather"
    assert json.loads(page.inner_text(".call pre")) == {"place": "Oslo"}
    assert page.get_attribute("#input", "placeholder") == "Result of weather"
    ask(page, "cold")
    assert texts(page)[-1] == "It is cold."
    call = model.asked[-1][-2]["tool_calls"][0]
    assert call["function"] == {"name": "weather", "arguments": '{"place": "Oslo"}'}
    assert model.asked[-1][-1]["tool_call_id"] == call["id"] == "c1"


def test_settings_reach_the_server(page: Any, model: ScriptedModel) -> None:
    page.click("#open-settings")
    assert page.get_attribute("[name=temperature]", "placeholder") == "0.8"
    page.fill("[name=system]", "Be brief.")
    page.fill("[name=temperature]", "0.25")
    page.fill("[name=max_tokens]", "9")
    page.fill("[name=stop]", "###")
    page.click("#settings [type=submit]")
    ask(page, "hello")
    assert model.asked[-1][0] == {"role": "system", "content": "Be brief."}
    given = model.options[-1]
    assert (given["temperature"], given["max_tokens"], given["stop"]) == (0.25, 9, ["###"])
    assert "top_k" not in given
    page.reload()
    page.click("#open-settings")
    assert (
        page.input_value("[name=system]") == "Be brief." and page.input_value("[name=temperature]") == "0.25"
    )
    page.click("#settings [type=reset]")
    page.click("#settings [type=submit]")
    ask(page, "again")
    assert "temperature" not in model.options[-1]


def test_conversations(page: Any, tmp_path: Path) -> None:
    for text in ("apples", "pears"):
        page.click("#new")
        ask(page, text)
    rows = page.locator("#chats .chat")
    assert rows.all_inner_texts() == ["pears", "apples"]
    page.fill("#search", "said kiwis")
    assert rows.all_inner_texts() == []
    page.fill("#search", "APPLES said")
    assert rows.all_inner_texts() == ["apples"]
    rows.first.click()
    assert texts(page)[0] == "apples"
    page.fill("#search", "")
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(tmp_path / "all.json")
    for title in ("apples", "pears"):
        page.once("dialog", lambda dialog: dialog.accept())
        page.hover(f"#chats [title={title}]")
        page.click(f"[aria-label='Delete {title}']")
    assert page.is_visible("#welcome") and rows.count() == 0
    page.set_input_files("#import-file", tmp_path / "all.json")
    page.wait_for_selector("#chats .chat")
    assert rows.all_inner_texts() == ["pears", "apples"]
    page.hover("#chats [title=pears]")
    page.click("[aria-label='Rename pears']")
    page.fill("#chats input", "fruit")
    page.press("#chats input", "Enter")
    page.reload()
    assert rows.all_inner_texts() == ["fruit", "apples"]


def test_a_link_fills_the_field_and_sends_nothing(page: Any, model: ScriptedModel) -> None:
    n = len(model.asked)
    page.goto("/?q=delete%20all")
    wait_for(page, "document.querySelector('#model').textContent")
    assert page.input_value("#input") == "delete all"
    assert not texts(page) and len(model.asked) == n


def test_the_key_is_requested_and_stored_for_the_tab(opened: Any, model: ScriptedModel) -> None:
    config = Config("fake.gguf", "fake", guard=Guard(("secret",)))
    with served(model, config) as address, page_of(opened, address.port) as page:
        page.goto("/")
        page.fill("#key-input", "wrong")
        page.press("#key-input", "Enter")
        page.wait_for_selector("#key-wrong:visible")
        page.fill("#key-input", "secret")
        page.press("#key-input", "Enter")
        ask(page, "hello")
        page.reload()
        wait_for(page, "document.querySelector('#model').textContent === 'fake'")
        ask(page, "again")
        assert len(texts(page)) == 4
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
        other = page.context.new_page()
        other.goto("/")
        other.wait_for_selector("#key[open]")


def test_the_page_waits_while_the_model_loads(opened: Any) -> None:
    model, may_open = ScriptedModel(), threading.Event()

    def open_(progress: Any) -> ScriptedModel:
        progress(1, 4)
        assert may_open.wait(30)
        return model

    with served(model, open_=open_) as address, page_of(opened, address.port) as page:
        page.goto("/")
        page.wait_for_selector("#notice:visible")
        assert page.inner_text("#notice-text") == "The model is loading (25 %)."
        may_open.set()
        page.wait_for_selector("#notice", state="hidden")
        assert page.inner_text("#model") == "fake"


def test_a_second_tab_shows_changes_of_the_first(page: Any) -> None:
    ask(page, "hello")
    other = page.context.new_page()
    other.goto(page.url)
    ask(other, "more")
    wait_for(page, "document.querySelectorAll('.message').length === 4")
    other.close()


def test_errors_are_shown_at_their_message(page: Any) -> None:
    error = page.locator(".assistant .error")
    ask(page, "refused")
    assert texts(page) == ["refused", ""] and error.inner_text() == "too late"
    page.click("#new")
    ask(page, "half")
    assert texts(page)[-1] == "half an answer" and error.last.inner_text() == "too late"
    page.context.set_offline(True)
    ask(page, "hello")
    assert error.last.inner_text() == "The server cannot be reached."
    page.context.set_offline(False)
    foot(page, 3, "Regenerate")
    page.wait_for_selector(".counter:visible")
    page.wait_for_selector("#send:visible")
    assert texts(page)[-1] == "You said hello."
    page.reload()
    page.wait_for_selector(".message")
    assert error.first.inner_text() == "too late"
