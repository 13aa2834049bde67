"""The script of the page's model: an answer for each question that a test asks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from places import ROOT
from scripted import Messages, Piece, Read, Thought, Wait

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
FORMATTED = re.findall(
    r"\s?\w{1,5}|\s+|[^\w\s]", (ROOT / "tests/data/answer.md").read_text(encoding="utf-8")
)  # like tokens
BAD_FORMULAS = r"""
$\href{javascript:window.pwned=1}{x}$ $\text{<img src=x onerror=window.pwned=1>}$ $\url{javascript:pwned}$
$\includegraphics{http://elsewhere.example/a.png}$ $\class{busy}{x}$ $\style{position:fixed}{x}$
$\id{send}{x}$
$\frac{a$ $\unknown{x}$ $\begin{cases}$ \(\) \[\rule{9999em}{9999em}\] $\def\a{\a\a}\a$

$\def\a{xxxxxxxxxx}\def\b{\a\a\a\a\a\a\a\a\a\a}\def\c{\b\b\b\b\b\b\b\b\b\b}\c\c\c\c\c$

$$
\htmlData{onclick=window.pwned=1}{x}
$$

""" + "".join(["$", "{" * 900, "}" * 900, "$\n\n$x", "^{y" * 300, "}" * 300, "$"])
CODE = "const a = [1, 'two', /three/]; // four <script>window.pwned = 1</script>\n" * 14_000  # 1 MB
ANSWERS: dict[str, Sequence[Piece]] = {
    "formatted": FORMATTED,
    "bad formulas": [BAD_FORMULAS],
    "megabyte": ["```js\n", *[CODE[i : i + 50_000] for i in range(0, len(CODE), 50_000)], "```\n\n", "End."],
    "many words": ["**a** " * 30_000],
    "kilobytes": ["```js\n", CODE[:90_000], "\n```\n\n", "End."],
    "long": LONG,
    "wait": ["one ", "two", Wait()],
    "hostile": [HOSTILE],
    "wide": [WIDE],
    "think": [Thought("Let me "), Thought("see."), "Done."],
    "growing": ["The square $x^2$ of", " x", Wait()],
    "long prompt": [Read(25, 100), Wait()],
    "two formulas": ["$stuck$ and $x^2$"],
    "half a call": [ToolDelta(0, "c1", "weather", '{"pla'), Wait()],
    "refused": [DeadlineExceeded("too late")],
    "half": ["half ", "an answer", DeadlineExceeded("too late")],
    "call": [ToolDelta(0, "c1", "weather", '{"place":'), ToolDelta(0, None, None, ' "Oslo"}')],
}


TITLES: dict[str, Sequence[Piece]] = {
    "slow title": ["The", Wait()],
    "no title": ["word " * 30],
    "broken title": ["The ", DeadlineExceeded("too late")],
}


def script(messages: Messages) -> Sequence[Piece]:
    last = messages[-1]
    if last["role"] == "tool":
        return [f"It is {last['content']}."]
    if str(last["content"]).startswith("Write a title"):
        return TITLES.get(str(messages[0]["content"]), ['**"The title', ' of it".**\n'])
    return ANSWERS.get(str(last["content"]), ["You said ", f"**{last['content']}**."])
