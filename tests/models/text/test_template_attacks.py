"""A separate process runs chat templates, and limits the damage of hostile templates."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import pytest
from processes import is_known
from templates import ECHO, pid_of, user_messages

from vkbackend import LLM
from vkbackend.errors import InvalidArgument
from vkbackend.models.conversation import Chat
from vkbackend.models.processes.worker import READ_S
from vkbackend.models.text import template_process
from vkbackend.models.text.chat_template import ChatTemplate

pytestmark = pytest.mark.no_vulkan


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "CPU_S", 0.4)


DEEP = "{% set n=namespace(x=[]) %}{% for i in range(30000) %}{% set n.x=[n.x] %}{% endfor %}"
SEGV = (
    "{% set n=namespace(x=range(3)) %}{% for i in range(50000) %}{% set n.x=n.x|batch(1) %}{% endfor %}"
    "{{ n.x|list|length }}"
)
ATTACKS = {
    # Jinja accepts these templates, but Python's compiler refuses the code that it generates.
    "break": ("{% break %}", "not valid: 'break' outside loop"),
    "argument twice": ("{{ dict(a=1,a=2) }}", "not valid: keyword argument repeated"),
    "loops in loops": (
        "{% for a in [1] %}" * 21 + "{% endfor %}" * 21,
        "not valid: too many statically nested",
    ),
    "ifs in ifs": ("{% if a %}" * 110 + "{% endif %}" * 110, "not valid: too many levels of indentation"),
    "digits": ("{{ " + "1" * 4301 + " }}", "not valid: .*4300 digits"),
    "parentheses": ("{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "not valid|ended the process"),
    "a long sum": ("{{ " + "+".join("a" * 300) + " }}", "computed for|recursion"),
    "a large power": ("{{ (10 ** 10000000) | string | length }}", "computed for"),
    "a large list": ("{{ [0] * 10 ** 10 }}", "512 MB of memory"),
    "a wide number": ("{{ '%0999999999d' % 1 }}", "512 MB of memory"),
    "a long text": ("{{ 'x' * 5000000 }}", "more than 4194304 characters"),
    "itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "deep": (DEEP + "{{ n.x | tojson }}", "recursion"),
    "another file": ("{% include '/etc/passwd' %}", "no loader"),
    "a long complaint": ("{{ raise_exception('x' * 10000000) }}", "does not take this conversation: x{900}"),
}
if sys.version_info < (3, 13):  # Later versions compute it.
    ATTACKS["crash"] = SEGV, "ended the process that ran it|computed for|recursion"


# These attacks run only with --all, because other attacks reach the same limits.
COSTLY = "a large power", "a wide number"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in ATTACKS if name not in COSTLY], id="most"),
        pytest.param([*ATTACKS], id="every", marks=pytest.mark.wide),
    ],
)
def test_attacks_are_typed_errors_and_do_not_affect_the_caller(names: list[str]) -> None:
    with LLM("models/demo/demo.gguf", devices=["numpy"], n_ctx=64) as llm:
        want = llm.generate("Once upon a time", 12, temperature=0).tokens
        texts, over = list[list[int | None]](), threading.Event()

        def generate() -> None:
            while not over.wait(1.0):
                texts.append(llm.generate("Once upon a time", 12, temperature=0).tokens)

        thread = threading.Thread(target=generate)
        thread.start()
        try:
            for name, (source, pattern) in ((name, ATTACKS[name]) for name in names):
                with pytest.raises(InvalidArgument) as error:
                    ChatTemplate(source).render(user_messages("a"))
                assert re.search(pattern, str(error.value)), (name, str(error.value)[:200])
                assert len(str(error.value)) < 1200
        finally:
            over.set()
            thread.join()
        assert texts and all(tokens == want for tokens in texts)


@pytest.mark.usefixtures("quick")
def test_after_an_attack_the_next_conversation_is_rendered() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for attack in (endless, "{{ [0] * 10 ** 10 }}"):
        template = ChatTemplate("{% if messages[0].content == 'bad' %}" + attack + "{% endif %}" + ECHO)
        assert template.render(user_messages("a")) == "[a]"
        with pytest.raises(InvalidArgument, match="chat template"):
            template.render(user_messages("bad"))
        assert template.render(user_messages("b", "c")) == "[b][c]"


def cpu_limit_s(pid: int) -> int:
    match = re.search(r"Max cpu time +(\d+) ", Path(f"/proc/{pid}/limits").read_text(encoding="utf-8"))
    assert match
    return int(match[1])


def test_each_conversation_has_the_full_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit includes the time to read a conversation."""
    monkeypatch.setattr(template_process, "CPU_S", 0.9)
    template = ChatTemplate("{% for a in range(20000) %}{{ loop.index }}{% endfor %}" + ECHO)
    pid = pid_of(template)
    first = cpu_limit_s(pid)
    assert first >= READ_S
    while cpu_limit_s(pid) == first:
        template.render(user_messages("a"))
    assert cpu_limit_s(pid) == first + 1 and pid_of(template) == pid


def test_a_process_that_ends_with_its_answer_is_not_asked_again() -> None:
    template = ChatTemplate("{% if messages %}{{ [0] * 10 ** 10 }}{% endif %}")
    pid = pid_of(template)
    with pytest.raises(InvalidArgument, match="512 MB"):
        template.render(user_messages("a"))
    assert not is_known(pid) and template.render([]) == ""


def test_invalid_conversations() -> None:
    template = ChatTemplate(ECHO)
    for bad in (b"bytes", {1, 2}, object(), 10**5000):
        with pytest.raises(InvalidArgument, match="conversation of texts"):
            template.render([{"role": "user", "content": bad}])  # type: ignore[dict-item]
    with pytest.raises(InvalidArgument, match="conversation has 33554"):
        template.render(user_messages("x" * (1 << 25)))
    with pytest.raises(InvalidArgument, match="is a bytes"):
        ChatTemplate(b"text")  # type: ignore[arg-type]
    assert template.render(user_messages("a")) == "[a]"


def test_a_chat_continues_after_its_template_crashed() -> None:
    source = (
        "{% if messages | length == 3 %}{{ [0] * 10 ** 10 }}{% endif %}"
        "{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    with LLM("models/demo/demo.gguf", devices=["numpy"], n_ctx=64) as llm:
        chat = Chat(llm, template=source)
        first = [chunk.token for chunk in chat.send("Once upon a time", 3, temperature=0)]
        with pytest.raises(InvalidArgument, match="chat template"):
            chat.send("more")
        assert len(chat.messages) == 2
        chat.clear()
        assert [chunk.token for chunk in chat.send("Once upon a time", 3, temperature=0)] == first
