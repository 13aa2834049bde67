"""Random models of each architecture produce llama.cpp's logits. llama.cpp writes these files with all keys,
as in its test-llama-archs. docs/architectures.md lists the differences."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vkbackend.models.architectures.registry import ARCHITECTURES
from vkbackend.tools.studies.llama_archs import DIFFERS, REFUSED, outcome_of

pytestmark = [
    pytest.mark.wide,
    pytest.mark.no_vulkan,
    pytest.mark.skipif(find_spec("xllamacpp") is None, reason="needs xllamacpp (extra oracles)"),
]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_files_of_llama_cpp(name: str, tmp_path: Path) -> None:
    outcome = outcome_of(name, sys.executable, tmp_path)
    if name in REFUSED:
        assert outcome.nmse is None and REFUSED[name] in outcome.reason
    else:
        assert outcome.nmse is not None, outcome.reason
        assert outcome.agrees or outcome.nmse <= DIFFERS.get(name, 0.0)
