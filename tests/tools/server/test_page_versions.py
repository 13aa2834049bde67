"""Test versions of messages, stopped answers, long messages, presets and titles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_page import ask, foot, send, texts, wait_for
from javascript import Run
from scripted import ScriptedModel
from serving import until

pytestmark = pytest.mark.no_vulkan


def regenerate(page: Any, index: int) -> None:
    foot(page, index, "Regenerate")
    page.wait_for_selector(".assistant .counter:visible")
    page.wait_for_selector("#send:visible")


def test_versions_are_compared_stored_and_exported(page: Any, tmp_path: Path) -> None:
    ask(page, "hello")
    regenerate(page, 1)
    ask(page, "more")
    page.click(".assistant .compare:visible")
    shown = page.locator("#version-list section")
    assert shown.locator(".body").all_inner_texts() == ["You said hello.", "You said hello."]
    assert shown.nth(1).get_attribute("aria-current") == "true"
    assert page.is_disabled("[aria-label='Use version 2']")
    page.click("[aria-label='Use version 1']")
    assert not page.is_visible("#versions")
    assert page.inner_text(".assistant .counter") == "1/2" and len(texts(page)) == 2
    page.keyboard.press("Alt+v")
    assert page.inner_text(".assistant .counter >> nth=0") == "2/2" and len(texts(page)) == 4
    page.keyboard.press("Alt+v")  # the first version follows the last version
    assert page.inner_text(".assistant .counter >> nth=0") == "1/2"
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(tmp_path / "all.json")
    page.evaluate("localStorage.clear()")
    page.reload()
    page.set_input_files("#import-file", tmp_path / "all.json")
    page.click("#chats .chat")
    until(lambda: page.inner_text(".assistant .counter") == "1/2")  # the import may still be drawn
    page.click("[aria-label='Later version']:visible")
    assert texts(page) == ["hello", "You said hello.", "more", "You said more."]


def test_an_edited_question_is_compared_with_its_answer(page: Any) -> None:
    ask(page, "first")
    foot(page, 0, "Edit")
    page.fill(".edit textarea", "second")
    page.press(".edit textarea", "Enter")
    page.wait_for_selector("#send:visible")
    page.click(".user .compare:visible")
    shown = page.locator("#version-list section")
    assert shown.locator(".question").all_inner_texts() == ["first", "second"]
    assert shown.locator(".body").all_inner_texts() == ["You said first.", "You said second."]
    page.keyboard.press("Escape")
    assert texts(page) == ["second", "You said second."]


def test_a_conversation_of_before_loads(page: Any) -> None:
    """Conversations that were stored before messages had the field `stopped`."""
    root = {"children": ["q"], "chosen": 0, "role": "root", "content": ""}
    question = {"children": ["a", "b"], "chosen": 0, "role": "user", "content": "old"}
    answers = {name: {"children": [], "chosen": 0, "role": "assistant", "content": name} for name in "ab"}
    chat = {"id": "d" * 24, "title": "old", "system": "", "nodes": {"": root, "q": question} | answers}
    page.evaluate("text => localStorage.setItem('vkbackend.chat.' + 'd'.repeat(24), text)", json.dumps(chat))
    page.reload()
    page.click("#chats .chat")
    assert texts(page) == ["old", "a"] and page.inner_text(".counter:visible") == "1/2"
    assert page.locator(".stopped:visible").count() == 0


def test_a_stopped_answer_stays_marked(page: Any, model: ScriptedModel) -> None:
    send(page, "wait")
    wait_for(page, "document.querySelector('.assistant > .body').textContent === 'one two'")
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    assert page.inner_text(".stopped:visible") == "Stopped"
    page.reload()
    page.wait_for_selector(".stopped:visible")
    exported = json.loads(page.evaluate("Object.values(localStorage).find(text => text.includes('one two'))"))
    assert [node.get("stopped") for node in exported["nodes"].values()].count(True) == 1
    ask(page, "hello")
    assert page.locator(".stopped:visible").count() == 1
    assert model.asked[-1][1] == {"role": "assistant", "content": "one two"}


def test_the_progress_of_a_long_prompt(page: Any) -> None:
    """The context meter counts the prompt while it is computed, and after a stop."""
    send(page, "long prompt")
    wait_for(page, "document.querySelector('.assistant .stats').textContent === 'reading the prompt: 25 %'")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    assert page.inner_text(".assistant .stats") == "prompt 100"
    assert page.inner_text("#context span") == "100 / 512"


def test_a_call_that_was_stopped_is_not_a_call(page: Any) -> None:
    send(page, "half a call")
    page.wait_for_selector(".call")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    assert page.locator(".call").count() == 0 and page.is_visible(".assistant .stopped")
    assert page.get_attribute("#input", "placeholder") == "Write a message"


def test_a_long_message_folds(page: Any, model: ScriptedModel) -> None:
    text = "word " * 4000 + "last"
    ask(page, text)
    assert len(texts(page)[0]) < 2000 and "last" not in texts(page)[0]
    assert model.asked[-1][-1]["content"] == text
    page.focus(".user .fold")
    page.keyboard.press("Enter")
    assert page.inner_text(".user .plain").endswith("last")
    assert page.get_attribute(".user .fold", "aria-expanded") == "true"
    page.keyboard.press("Enter")
    assert page.inner_text(".user .fold") == "Show all 4,001 words" and "last" not in texts(page)[0]
    page.click("#new")
    ask(page, "short\n" * 10)
    assert page.locator(".fold").count() == 0


def test_beginnings(run: Run) -> None:
    given = ["a", "a\n" * 23, "b\n" * 24, "c" * 2250, "d" * 2251, "e" * 1499 + "😀" * 1000]
    function = "(m, texts) => texts.map((text) => m.beginning(text).length)"
    lengths = run("fold.js", function, given)
    assert lengths == [1, 46, 31, 2250, 1500, 1499]


def test_presets_fill_the_fields(page: Any, model: ScriptedModel) -> None:
    page.click("#open-settings")
    assert page.is_checked("#preset-default")
    page.fill("[name=seed]", "7")
    page.check("#preset-precise")
    assert page.input_value("[name=temperature]") == "0.2" and page.input_value("[name=seed]") == "7"
    assert page.inner_text("label[for=set-temperature]") == "Freedom temperature"
    page.click("#settings [type=submit]")
    ask(page, "hello")
    assert (model.options[-1]["temperature"], model.options[-1]["top_p"]) == (0.2, 0.9)
    page.reload()
    page.click("#open-settings")
    assert page.is_checked("#preset-precise")
    page.fill("[name=temperature]", "0.3")
    assert page.locator("#presets :checked").count() == 0
    page.focus("#preset-default")
    page.keyboard.press("Space")
    page.keyboard.press("ArrowDown")
    assert page.is_checked("#preset-precise") and page.input_value("[name=temperature]") == "0.2"
    page.click("#settings [type=reset]")
    wait_for(page, "document.querySelector('#preset-default').checked")
    assert page.input_value("[name=temperature]") == "" and page.is_checked("[name=titles]")
    page.click("#settings [type=submit]")


def test_every_preset_is_recognized(run: Run) -> None:
    function = """(m) => m.PRESETS.map(([id]) => {
        const values = m.withPreset({ seed: "7", temperature: "3" }, id);
        return [id, m.presetOf(values), values.seed];
    })"""
    assert all(
        given == recognized and seed == "7" for given, recognized, seed in run("sampling.js", function)
    )


def with_titles(page: Any) -> None:
    page.evaluate("localStorage.clear()")
    page.reload()
    wait_for(page, "document.querySelector('#model').textContent")


def titles_asked(model: ScriptedModel) -> list[int]:
    return [i for i, asked in enumerate(model.asked) if str(asked[-1]["content"]).startswith("Write a title")]


def test_the_model_writes_the_title(page: Any, model: ScriptedModel) -> None:
    with_titles(page)
    n = len(titles_asked(model))
    ask(page, "hello")
    wait_for(page, "document.querySelector('#title').textContent === 'The title of it'")
    assert page.inner_text("#chats .chat") == "The title of it"
    index = titles_asked(model)[-1]
    assert [message["content"] for message in model.asked[index][:2]] == ["hello", "You said **hello**."]
    assert model.options[index]["max_tokens"] <= 32
    ask(page, "more")
    regenerate(page, 1)
    assert len(titles_asked(model)) == n + 1  # a conversation with a title keeps it
    page.reload()
    assert page.inner_text("#chats .chat") == "The title of it"


def test_a_slow_title_never_delays_an_answer(page: Any, model: ScriptedModel) -> None:
    with_titles(page)
    ask(page, "slow title")
    until(lambda: model.active == 1)
    ask(page, "hello")
    assert texts(page)[-1] == "You said hello."
    until(lambda: model.active == 0)  # the request for the title was cancelled
    assert page.inner_text("#title") == "slow title"
    page.click("#new")
    ask(page, "slow title")
    until(lambda: model.active == 1)
    page.keyboard.press("Escape")
    until(lambda: model.active == 0)


@pytest.mark.parametrize("question", ["no title", "broken title"])
def test_without_a_title_the_question_remains(page: Any, model: ScriptedModel, question: str) -> None:
    with_titles(page)
    n = len(titles_asked(model))
    ask(page, question)
    until(lambda: len(titles_asked(model)) == n + 1 and model.active == 0)
    ask(page, "hello")
    assert page.inner_text("#title") == question and not page.is_visible("#notice")


def test_titles_are_one_short_line(run: Run) -> None:
    given = {
        'Title: "Blue whales"': "Blue whales",
        "# **Blue whales**\n\nMore": "Blue whales",
        "„Blauwale“.": "Blauwale",
        "": "",
        '""': "",
        "one two three four five six seven eight nine ten eleven": "",
        "x" * 100: "x" * 59 + "…",
    }
    titles = run("titles.js", "(m, texts) => texts.map(m.titleFrom)", list(given))
    assert dict(zip(given, titles, strict=True)) == given
