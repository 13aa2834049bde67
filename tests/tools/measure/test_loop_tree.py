"""Trees of loops from a listing, and their counts."""

from __future__ import annotations

import pytest

from vkbackend.errors import VkbackendError
from vkbackend.tools.measure.assembly import Listing, Op
from vkbackend.tools.measure.dialects import listing
from vkbackend.tools.measure.loop_tree import Issued, issued, loop_tree

pytestmark = pytest.mark.no_vulkan

ADD, HINT = "\tv_add_nc_u32_e32 v1, 1, v1 ; 4a\n", "\ts_delay_alu instid0(VALU_DEP_1) ; bf\n"
WMMA = "\tv_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7] ; cc\n"
LOAD = "\tbuffer_load_b128 v[0:3], v4, s[0:3], 0 offen ; e0\n"
# An outer loop with two inner loops. The first inner loop has two back edges to its start.
TEXT = (
    f"{ADD}BB1:\n{ADD}{LOAD}BB2:\n{ADD}\ts_cbranch_scc1 BB2 ; bf\n{WMMA}{HINT}\ts_branch BB2 ; bf\n"
    f"{ADD}BB3:\n{ADD}{ADD}\ts_cbranch_scc1 BB3 ; bf\n\ts_branch BB1 ; bf\n{ADD}\ts_endpgm ; bf\n"
)


def test_loops_count_as_often_as_they_run() -> None:
    tree = loop_tree(listing("AMD", TEXT, 64))
    assert tree.shape() == "((()()))" and tree.own == Issued(2)
    (outer,) = tree.inner
    assert outer.own == Issued(4, loads=1)
    assert [loop.own for loop in outer.inner] == [Issued(3, 1, 4096), Issued(3)]
    total = issued(tree, (1, ((5, ((10, ()), (0.5, ()))),)), "k")
    assert total == Issued(2 + 5 * (4 + 10 * 3 + 0.5 * 3), 50, 50 * 4096, 5)


@pytest.mark.parametrize("trips", [(1, ()), (1, ((5, ()),)), (1, ((5, ((1, ()), (1, ()), (1, ()))),))])
def test_a_loop_without_trips_is_an_error(trips: tuple[float, tuple[()]]) -> None:
    tree = loop_tree(listing("AMD", TEXT, 64))
    with pytest.raises(VkbackendError, match=r"of a kernel: the compiler's listing has .* loops"):
        issued(tree, trips, "of a kernel")


def test_loops_that_overlap_are_an_error() -> None:
    ops = tuple(Op("v_add", "vector") for _ in range(6))
    with pytest.raises(VkbackendError, match="overlap"):
        loop_tree(Listing(ops, (range(4), range(2, 6))))
