from __future__ import annotations

import random
from typing import Any

import pytest
from javascript import Run

pytestmark = pytest.mark.no_vulkan


def text(*nodes: Any) -> list[Any]:
    return [{"type": "paragraph", "nodes": list(nodes)}]


def mark(kind: str, *nodes: Any) -> dict[str, Any]:
    return {"type": kind, "nodes": list(nodes)}


def link(href: str, *nodes: Any, image: bool = False) -> dict[str, Any]:
    return {"type": "link", "href": href, "nodes": list(nodes), "image": image}


def bullets(*items: list[Any], start: int | None = None, loose: bool = False) -> dict[str, Any]:
    items_ = [{"task": None, "blocks": blocks} for blocks in items]
    return {"type": "list", "start": start, "isLoose": loose, "items": items_}


def code(content: str, language: str = "") -> dict[str, Any]:
    return {"type": "code", "language": language, "text": content}


BREAK = {"type": "break"}
INLINES: list[tuple[str, list[Any]]] = [
    ("a *b* __c__ ~~d~~", text("a ", mark("em", "b"), " ", mark("strong", "c"), " ", mark("del", "d"))),
    ("***a***", text(mark("em", mark("strong", "a")))),
    ("**a *b* c**", text(mark("strong", "a ", mark("em", "b"), " c"))),
    ("snake_case_name 2 * 3 * 4", text("snake_case_name 2 * 3 * 4")),
    ("**open", text("**open")),
    ("`a*b*` ``c`d``", text({"type": "code", "text": "a*b*"}, " ", {"type": "code", "text": "c`d"})),
    ("`open", text("`open")),
    (r"\*a\* &lt;b&gt; &copy;", text("*a* <b> &copy;")),
    ("a\nb", text("a", BREAK, "b")),
    ("<script>alert(1)</script>", text("<script>alert(1)</script>")),
    ("[a *b*](https://x.y/?q=1)", text(link("https://x.y/?q=1", "a ", mark("em", "b")))),
    ('[a](http://x.y/z_(w) "t")', text(link("http://x.y/z_(w)", "a"))),
    ("[a](mailto:b@c.d)", text(link("mailto:b@c.d", "a"))),
    ("[a](javascript:alert(1))", text("[a](javascript:alert(1))")),
    ("[a](data:text/html,b)", text("[a](data:text/html,b)")),
    ("[a](/props)", text("[a](/props)")),
    ("![a](https://x.y/z.png)", text(link("https://x.y/z.png", "a", image=True))),
    ("[1] and [2]", text("[1] and [2]")),
]
BLOCKS: list[tuple[str, list[Any]]] = [
    ("# A\n## B ##", [{"type": "heading", "level": n, "nodes": [t]} for n, t in ((1, "A"), (2, "B"))]),
    ("a\n\nb", text("a") + text("b")),
    ("#no", text("#no")),
    ("```py\nx\n\n y\n```\nz", [code("x\n\n y", "py"), *text("z")]),
    ("~~~\n```\n~~~", [code("```")]),
    ("```\nx\n", [code("x")]),
    ("- a\n- b", [bullets(text("a"), text("b"))]),
    ("1. a\n2. b", [bullets(text("a"), text("b"), start=1)]),
    ("3) a", [bullets(text("a"), start=3)]),
    ("- a\n  - b\n    - c", [bullets([*text("a"), bullets([*text("b"), bullets(text("c"))])])]),
    ("1. a\n  - b\n2. c", [bullets([*text("a"), bullets(text("b"))], text("c"), start=1)]),
    ("1. a\n\n   ```\n   b\n   ```", [bullets([*text("a"), code("b")], start=1, loose=True)]),
    ("- a\n\nb", [bullets(text("a")), *text("b")]),
    ("in\n1985. a", text("in", BREAK, "1985. a")),
    ("- - -\n* * *", [{"type": "rule"}, {"type": "rule"}]),
    ("> a\nb\n>\n> c", [{"type": "quote", "blocks": text("a", BREAK, "b") + text("c")}]),
    (
        "|a|b|\n|-|-:|\n|1|`2`|\n|3|\n\nc",
        [
            {"type": "table", "align": ["left", "right"], "head": [["a"], ["b"]],
             "rows": [[["1"], [{"type": "code", "text": "2"}]], [["3"], []]]},
            *text("c"),
        ],
    ),
    ("a | b\nc", text("a | b", BREAK, "c")),
]  # fmt: skip


@pytest.mark.parametrize("cases", [INLINES, BLOCKS], ids=["inlines", "blocks"])
def test_markdown(run: Run, cases: list[tuple[str, list[Any]]]) -> None:
    parsed = run("markdown.js", "(m, texts) => texts.map(m.parse)", [source for source, _ in cases])
    for (source, expected), blocks in zip(cases, parsed, strict=True):
        assert blocks == expected, source


def test_task_items(run: Run) -> None:
    (block,) = run("markdown.js", "(m) => m.parse('- [x] a\\n- [ ] b')")
    assert [item["task"] for item in block["items"]] == [True, False]


FRAGMENTS = (
    "word ", "\n", "\n", "\n\n", "*", "**", "`", "```\n", "~~~", "- ", "1. ", "  ", "    ", "> ", "# ", "|",
    "|-|-|\n", "---\n", "[", "](", ")", "https://a.b/", "<", "\\", "_", "\t", "\r\n", "é", "😀",
)  # fmt: skip


def test_a_growing_text_parses_like_the_complete_text(run: Run, request: pytest.FixtureRequest) -> None:
    """The parser finishes a block only if later text cannot change it, however the text is divided into
    pieces."""
    chance = random.Random(1)
    cases = []
    for _ in range(1500 if request.config.getoption("--all") else 500):
        pieces = [chance.choice(FRAGMENTS) for _ in range(chance.randint(1, 40))]
        whole, cuts = "".join(pieces), []
        while sum(map(len, cuts)) < len(whole):
            begin = sum(map(len, cuts))
            cuts.append(whole[begin : begin + chance.randint(1, 6)])
        cases.append(cuts)
    wrong = run(
        "markdown.js",
        """(m, cases) => cases.filter((pieces) => {
            const stream = new m.BlockStream(), found = [];
            let text = "";
            for (const piece of pieces) found.push(...stream.push((text += piece)).settled);
            found.push(...stream.push(text, true).settled);
            return JSON.stringify(found) !== JSON.stringify(m.parse(text));
        })""",
        cases,
    )
    assert not wrong, min(wrong, key=lambda pieces: len("".join(pieces)))


def test_the_number_of_elements_is_limited(run: Run) -> None:
    """A block with too many parts, and the text after the last allowed block, are plain text."""
    heavy = ["- a\n" * 9000, "|a|b|\n|-|-|\n" + "|1|2|\n" * 9000, "$a$ " * 25_000, "a\n" * 25_000]
    texts = [*heavy, "- a\n" * 2000]
    kinds = run("markdown.js", "(m, texts) => texts.map((text) => m.parse(text)[0].type)", texts)
    assert kinds == ["text", "text", "text", "text", "list"]
    function = """(m, text) => {
        const stream = new m.BlockStream(), whole = new m.BlockStream().push(text, true).settled, found = [];
        for (let n = 0; n < text.length; n += 999) found.push(...stream.push(text.slice(0, n)).settled);
        found.push(...stream.push(text, true).settled);
        return [JSON.stringify(found) === JSON.stringify(whole), whole.length, whole.at(-1)];
    }"""
    source = "".join(f"{i}\n\n" for i in range(7000))
    is_same, n, last = run("markdown.js", function, source)
    assert is_same and n == 5000
    assert last == {"type": "text", "text": source[source.index("4999\n") :].removesuffix("\n") + "\n"}


PIECES = (
    "*", "**a ", "_a", "``` ` ``", "[", "[](a", "![a](", "<http:", "> ", "- ", "a:", "http://", "|",
    "a|b\n-|-\n", "~", "\\", "1. a\n", "&", "*a_b", "*a*\n", "$a ", "$a$", "\\(", "\\[\n",
    "$$a\n", "$$\n$$\n", "a\n$$ b\n",
)  # fmt: skip


@pytest.mark.wide
def test_long_texts_take_linear_time(run: Run) -> None:
    """A parser with quadratic time would exceed the time limit on 100,000 characters."""
    function = "(m, pieces) => pieces.map((one) => m.parse(one.repeat(100000 / one.length)).length)"
    assert all(n >= 1 for n in run("markdown.js", function, PIECES))
