from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from device_sets import device_infos
from fake_llama_cpp import install

from vkbackend.tools.measure import synthetic
from vkbackend.tools.studies import embeddings

TINY = ("llama", 2048, False, synthetic._dense(1, 256, 4, 2, 64, 512))


@pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")
def test_llama_cpp_embeds_the_same_texts_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "tiny", TINY)
    monkeypatch.setattr(embeddings, "SIZES", (1, 5))
    calls_of, asked = install(tmp_path, monkeypatch), []
    embed = embeddings.LlamaCpp.embed

    def counted(self: embeddings.LlamaCpp, texts: list[list[int]]) -> tuple[float, float, np.ndarray]:
        seconds, cpu_s, vectors = embed(self, texts)
        asked.append(len(texts))
        assert vectors.shape == (len(texts), 256)
        assert vectors[:, :3].tolist() == [[sum(text), 0 + 1 + 2 + 3, 4] for text in texts]
        return seconds, cpu_s, vectors

    monkeypatch.setattr(embeddings.LlamaCpp, "embed", counted)
    embeddings.main("--synthetic tiny:f16 -dev 0 -ub 8 -l 4 -r 2 --compare llama-cpp".split())
    assert asked == [1, 5] * 3
    _, context, *calls = calls_of()
    assert (context["n_seq_max"], context["n_ctx"], context["pooling_type"]) == (5, 20, 1)
    assert context["embeddings"] is True and context["n_ubatch"] == 8
    assert [call["decode"] for call in calls] == [4, 8, 8, 4] * 3  # two texts fit into a micro-batch
    *_, header, _, one, five = capsys.readouterr().out.splitlines()
    columns = header.strip("| ").split(" | ")
    assert columns[-4:] == ["llama.cpp texts/s", "ratio", "llama.cpp CPU ms/text", "ratio"]
    for row in (one, five):
        cells = dict(enumerate(map(float, row.strip("| ").split(" | "))))
        assert cells[7] == pytest.approx(cells[2] / cells[6], rel=0.02)
        assert cells[9] == pytest.approx(cells[8] / cells[5], rel=0.02)
    assert [row.split(" | ")[1] for row in (one, five)] == ["1", "3"]  # steps
