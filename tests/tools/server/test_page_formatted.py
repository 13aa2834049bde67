"""Test answers with code and formulas. Hostile answers run nothing, lose nothing and do not freeze the
page."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest
from chat_page import ask, send, texts, wait_for
from javascript import Run
from page_answers import CODE
from places import ROOT

from vkbackend.tools.server.static import FOLDER

pytestmark = pytest.mark.no_vulkan

BODY = ".assistant > .body"
IS_TYPESET = f"""document.querySelectorAll("{BODY} .formula > math").length === 9
    && document.querySelectorAll("{BODY} pre:has([class^=c-])").length === 3"""


@pytest.fixture
def tall(page: Any) -> Any:
    """Yield the page in a window that shows a whole answer, because only visible text is typeset."""
    page.set_viewport_size({"width": 1280, "height": 2400})
    yield page
    page.set_viewport_size({"width": 1280, "height": 800})


def test_a_formatted_answer(tall: Any) -> None:
    page = tall
    ask(page, "formatted")
    wait_for(page, IS_TYPESET)
    body = page.locator(BODY)
    assert body.locator("h3, h4, h5").all_inner_texts() == ["Merge sort, with its cost", "The code", "Steps"]
    assert body.locator("li").count() == 7 and body.locator("li .task").count() == 0
    assert body.locator("table tr").count() == 4 and body.locator("td math").count() == 3
    assert body.locator("blockquote math").count() == 1 and body.locator("li math mo").count() > 1
    assert body.locator("mfrac").count() == 2 and body.locator("mtable").count() == 3
    assert "Prices such as $5 or $10 remain text." in body.inner_text()
    assert page.inner_text(f"{BODY} .c-keyword >> nth=0") == "def"
    assert page.inner_text(f"{BODY} .c-title") == "merge_sort"
    answer = (ROOT / "tests/data/answer.md").read_text(encoding="utf-8")
    codes = [code.text_content() for code in page.query_selector_all(f"{BODY} pre code")]
    assert codes == [re.sub("(?m)^   (?=const)", "", code) for code in blocks_of(answer)]
    page.reload()
    page.wait_for_selector(".message")
    wait_for(page, IS_TYPESET)


def blocks_of(answer: str) -> list[str]:
    return re.findall(r"```\w+\n(.*?)\n *```", answer, re.DOTALL)


def test_a_growing_formula_is_typeset_before_its_paragraph_ends(page: Any) -> None:
    send(page, "growing")
    wait_for(page, f"document.querySelector('{BODY} math msup')")
    assert page.is_visible("#stop")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    assert page.inner_text(".stopped:visible") == "Stopped"


def test_bad_formulas_remain_text(tall: Any) -> None:
    page = tall
    ask(page, "bad formulas")
    wait_for(page, f"document.querySelector('{BODY} math')")
    ask(page, "hello")  # the worker still works, and typesets in order
    for source in (r"$\frac{a$", r"$\unknown{x}$", r"$\begin{cases}$", r"$\def\a{\a\a}\a$"):
        assert source in page.text_content(BODY), source
    assert page.evaluate("window.pwned") is None
    allowed = "math, math *, p, span, br"
    body = page.locator(BODY).first
    assert body.locator(f"*:not({allowed})").count() == 0
    assert body.locator(":is([href], [src], [id], [onclick], a, img, iframe)").count() == 0
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 1280
    box = page.locator("article.assistant >> nth=0").bounding_box()
    assert box["height"] < 20_000  # a rule of 9999em would be 160,000 pixels high


@pytest.mark.parametrize(("question", "length"), [("megabyte", len(CODE)), ("kilobytes", 90_000)])
def test_long_code_keeps_the_page_usable(page: Any, question: str, length: int) -> None:
    """Code above 100,000 characters remains plain; up to this limit a worker colours it."""
    page.evaluate("""() => {
        window.longest = 0;
        let last = performance.now();
        const tick = () => {
            window.longest = Math.max(window.longest, performance.now() - last);
            last = performance.now();
            window.timer = setTimeout(tick, 10);
        };
        tick();
    }""")
    ask(page, question)
    if length < 100_000:
        page.evaluate("document.querySelector('#scroller').scrollTop = 0")
        wait_for(page, f"document.querySelector('{BODY} .c-keyword')")
    assert page.text_content(f"{BODY} pre code") == CODE[:length].removesuffix("\n")
    assert page.evaluate("window.pwned") is None
    # this does not test speed: with quadratic time, the page would be frozen for minutes
    assert page.evaluate("clearTimeout(window.timer), window.longest") < 10_000


def test_an_answer_with_too_many_elements_is_plain_text(page: Any) -> None:
    ask(page, "many words")
    assert len(texts(page)[-1]) == 180_000 and page.locator(f"{BODY} *").count() == 1


def test_a_text_that_takes_too_long_remains_plain(page: Any) -> None:
    """A worker that does not answer is ended at its deadline. The next text gets a new worker."""
    page.route("**/page/worker.js", lambda route: route.fulfill(body=STUCK, content_type="text/javascript"))
    page.reload()
    ask(page, "two formulas")
    wait_for(page, f"document.querySelectorAll('{BODY} math').length === 1")
    assert texts(page)[-1].startswith("$stuck$ and ")
    html = page.evaluate(f"document.querySelector('{BODY} math').outerHTML")
    assert html == "<math>x</math>"  # the page copies only tags, attributes and styles that its lists contain
    page.unroute("**/page/worker.js")


STUCK = """
onmessage = ({ data }) => {
    while (data.text === "stuck");
    const attributes = { onclick: "pwned", id: "send" };
    const bad = { attributes, style: { position: "fixed" }, classes: ["a b"] };
    postMessage({ tree: { tag: "math", ...bad, children: [{ tag: "script", children: ["x"] }] } });
};
postMessage("ready");
"""


def test_vendored_files_are_the_published_ones() -> None:
    """docs/licences.md lists the hash of each file, as published."""
    page = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` .* \| `([0-9a-f]{64})` \|$", page, re.MULTILINE))
    files = sorted(FOLDER.joinpath("vendor").iterdir())
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files} == rows
    assert all(any(file.name == f"{name}.LICENSE" for file in files) for name in ("highlight", "temml"))


PRICES = ("$5 or $10", "$5-$10", "US$5 and US$10", "$ x $", r"\$x\$", "$$", "$", "a $", r"\( \)", "`$x$`")
FORMULAS = (
    ("$x$", "x", False),
    (r"\(x\)", "x", False),
    (r"\[x\]", "x", True),
    ("a $$x$$ b", "x", True),
    (r"$a\$b$", r"a\$b", False),
    ("$5 and then $x$", "x", False),
    ("*a $x*y$ b*", "x*y", False),
)


def test_dollars_of_formulas_and_of_prices(run: Run) -> None:
    parsed = run(
        "inline.js", "(m, texts) => texts.map(m.parseInline)", [*PRICES, *[source for source, *_ in FORMULAS]]
    )
    for source, nodes in zip(PRICES, parsed, strict=False):
        assert not formulas_in(nodes), source
    for (source, text, is_display), nodes in zip(FORMULAS, parsed[len(PRICES) :], strict=True):
        assert formulas_in(nodes) == [(text, is_display)], source


def formulas_in(nodes: list[Any]) -> list[tuple[str, bool]]:
    formulas = []
    for node in nodes:
        if isinstance(node, dict):
            if node["type"] == "formula":
                formulas.append((node["text"], node["isDisplay"]))
            formulas += formulas_in(node.get("nodes", []))
    return formulas
