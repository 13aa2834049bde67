from __future__ import annotations

import pytest

from vkbackend.errors import InvalidArgument
from vkbackend.models.text.markers import Markers

pytestmark = pytest.mark.no_vulkan


def test_places_are_those_of_the_own_markers() -> None:
    markers, others = Markers(), Markers()
    first, second = markers.of("0a"), markers.of("ff01")
    text = f"a{first}{others.of('0a')}b{second}"
    places = markers.places(text)
    assert [key for *_, key in places] == ["0a", "ff01"]
    assert [text[begin:end] for begin, end, _ in places] == [first, second]


def test_line_breaks_separate_texts_only() -> None:
    markers = Markers()
    mark = markers.of("aa")
    assert markers.joined(["a", "b"]) == "a\nb"
    assert markers.joined(["", "b"]) == "\nb"
    assert markers.joined(["a", mark, "b", "c", mark, mark]) == f"a{mark}b\nc{mark}{mark}"
    assert markers.joined([]) == ""


@pytest.mark.parametrize("n", [0, 2])
def test_a_template_writes_each_marker_once(n: int) -> None:
    markers = Markers()
    contents = ["x", f"{markers.of('aa')}y"]
    markers.check(contents, f"[{contents[1]}]")
    with pytest.raises(InvalidArgument, match=f"writes {n} images of a conversation with 1"):
        markers.check(contents, n * contents[1])
