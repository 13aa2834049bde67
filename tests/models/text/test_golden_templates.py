"""Templates that resemble published templates render the same texts as in transformers."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from oracles.make_templates import CONVERSATIONS, GOLDEN, TEMPLATES, TOKENS, VARIABLES, make

from vkbackend.errors import InvalidArgument
from vkbackend.models.text.chat_template import ChatTemplate

pytestmark = pytest.mark.no_vulkan

NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
DATE = {"date_string": "26 Jul 2024"}  # Llama 3.1's default date
KEPT = json.loads((GOLDEN / "templates.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_texts_equal_transformers(name: str) -> None:
    """vkbackend's renderer and transformers refuse the same templates, with one exception. If documents or
    tools are None, a loop over them has zero rounds in vkbackend's renderer."""
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, TOKENS["bos_token"], TOKENS["eos_token"])
    n_texts = 0
    for talk, messages in CONVERSATIONS.items():
        for kind, variables in VARIABLES.items():
            want = KEPT["texts"][name][f"{talk}, {kind}"]
            if isinstance(want, str):
                assert template.render(messages, **(DATE | variables)) == want, (talk, kind)
                n_texts += 1
            elif "'NoneType' object is not iterable" not in want["refused"]:
                with pytest.raises(InvalidArgument):
                    template.render(messages, **variables)
    assert n_texts >= 14


def test_every_family_has_a_template() -> None:
    assert sorted(KEPT["texts"]) == NAMES and len(NAMES) >= 10
    several = sum(isinstance(text, str) for texts in KEPT["texts"].values() for text in texts.values())
    assert several > 900


@pytest.mark.oracle
def test_stored_texts_equal_the_installed_transformers() -> None:
    if find_spec("transformers") is None:
        pytest.skip("not installed: transformers")
    assert make()["texts"] == KEPT["texts"]
