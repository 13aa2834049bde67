"""Random prompts with images run on a runner without a model. If an image's rows attend to each other, one
step computes all remaining rows. Other requests do not change an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from fake_runner import FakeRunner, continuation
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples
from scheduling import GREEDY, Everything, finish, tokens_of

from vkbackend.meta.step_kind import Wanted
from vkbackend.models.engine.cache.image_spans import with_row_ids
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.runner.micro_batch import MicroBatch
from vkbackend.models.vision.rows import ImageRows
from vkbackend.step import Run

FIRST = 1000  # the token of the first value of an image


class Seeing(FakeRunner):
    """Rows of images have one value, which replaces the token."""

    image_width = 1

    def launch(self, batch: MicroBatch, wanted: Wanted) -> Any:
        tokens, runs = list(batch.tokens), list[Run]()
        for first, values in batch.images.rows if batch.images else ():
            assert not any(tokens[first : first + len(values)])
            tokens[first : first + len(values)] = values[:, 0].astype(int).tolist()
        for run in batch.runs:
            kinds = {token // FIRST % 2 for token in tokens[run.first_row : run.first_row + run.n_rows]}
            if kinds == {1} and run.n_rows > 1:  # rows of an image that attend to each other
                assert run.end == run.first_pos + run.n_rows
                assert tokens[run.first_row + run.n_rows - 1] % 100 == 99
            else:
                assert not run.end and (1 not in kinds or run.n_rows == 1)
            if runs and runs[-1].slot == run.slot:
                runs[-1] = replace(runs[-1], n_rows=runs[-1].n_rows + run.n_rows)
            else:
                runs.append(replace(run, end=0))
        return super().launch(batch._replace(tokens=tokens, runs=runs), wanted)


def image_of(number: int, n_rows: int, both_ways: bool) -> ImageRows:
    """Return an image. For each of its values, `value // 1000` is odd if the image's rows attend to each
    other, and otherwise even. The image's last value ends in 99."""
    values = FIRST * (2 * number + both_ways) + np.arange(100 - n_rows, 100)
    return ImageRows(bytes([number] * 16), values.astype(np.float32)[:, None], (1, n_rows), both_ways)


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_images_among_other_requests(data: st.DataObject) -> None:
    draw = data.draw
    n_slots, n_ubatch = draw(st.integers(1, 4)), draw(st.integers(12, 20))
    n_most = n_ubatch - n_slots + 1
    options = {"n_ctx": 64, "n_slots": n_slots, "n_ubatch": n_ubatch, "prefix_cache": draw(st.booleans())}
    if draw(st.booleans()):
        options["blocks"] = draw(st.integers(2, 4))
    runner = Seeing(**options)
    engine = Engine(runner, Everything())  # type: ignore[arg-type]
    known = [image_of(i, draw(st.integers(1, n_most)), draw(st.booleans())) for i in range(1, 4)]
    requests, want = [], {}
    for id_ in range(draw(st.integers(1, 6))):
        pieces: list[int | ImageRows] = []
        for _ in range(draw(st.integers(1, 3))):
            pieces += draw(st.lists(st.integers(1, 39), max_size=12))
            pieces.append(draw(st.sampled_from(known)))
        tokens, images = with_row_ids([7, *pieces])
        seen = list(tokens)
        for span in images:
            seen[span.first : span.end] = span.image.values[:, 0].astype(int).tolist()
        if len(tokens) < 56:
            requests.append(Generate(id_, tokens, 5, GREEDY, images=images))
            want[id_] = continuation(seen, 5)
    events = finish(engine, requests)  # type: ignore[arg-type]
    assert {id_: tokens_of(of) for id_, of in events.items()} == want
