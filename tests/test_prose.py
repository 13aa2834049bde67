"""The prose is plain: phrases that `vkbackend.tools.checkout.prose` counts must be rare."""

from __future__ import annotations

import subprocess

import pytest
from places import ROOT

from vkbackend.tools.checkout import prose

pytestmark = [
    pytest.mark.no_vulkan,
    pytest.mark.skipif(
        subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode != 0,
        reason="not a checkout of git",
    ),
]


def test_turns_of_phrase_are_rare() -> None:
    texts = [passage.text for passage in prose.passages(ROOT)]
    n_words = sum(map(prose.words, texts))
    rates = {t: 1000 * sum(len(t.pattern.findall(text)) for text in texts) / n_words for t in prose.TURNS}
    too_often = {t.name: f"{rate:.2f}, at most {t.most:.2f}" for t, rate in rates.items() if rate > t.most}
    assert not too_often, "python -m vkbackend.tools.checkout.prose --list TURN prints the places"
