"""The steps of collectives: they end with what the call returns, and have as many steps as the chapter's table says."""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_lab.viz import collective_steps

ROOTED = ("broadcast", "reduce", "scatter", "gather")


def rows_of(num_ranks, size):
    return [[100 * rank + i for i in range(size)] for rank in range(num_ranks)]


def returned(name, before, root):
    """What each rank gets back, and the number of steps."""
    num_ranks, ranks = len(before), range(len(before))
    total, everything = [sum(column) for column in zip(*before, strict=True)], [v for row in before for v in row]
    only = lambda row: [row if rank == root else [] for rank in ranks]  # noqa: E731
    length = len(before[0]) // num_ranks
    blocks = [[row[i * length : (i + 1) * length] for i in ranks] for row in before]
    return {
        "all_reduce": ([total] * num_ranks, 2 * (num_ranks - 1)),
        "reduce_scatter": ([total[i * length : (i + 1) * length] for i in ranks], num_ranks - 1),
        "all_gather": ([everything] * num_ranks, num_ranks - 1),
        "all_to_all": ([[v for src in ranks for v in blocks[src][dst]] for dst in ranks], 1),
        "broadcast": ([before[root]] * num_ranks, ceil(log2(num_ranks))),
        "reduce": (only(total), num_ranks),
        "scatter": (blocks[root], 1),
        "gather": (only(everything), 1),
    }[name]


@given(
    st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "all_to_all", *ROOTED]),
    st.integers(2, 7),
    st.integers(1, 3),
    st.data(),
)
def test_steps_end_with_what_the_call_returns(name, num_ranks, length, data):
    root = data.draw(st.integers(0, num_ranks - 1)) if name in ROOTED else None
    before = rows_of(num_ranks, length * num_ranks)
    after, num_steps = returned(name, before, root or 0)
    drawing = collective_steps(name, before, after, root)
    assert len(drawing.log) == num_steps
    assert [[int(text) for text, _ in cells] for cells in drawing.states[-1]] == after
    for cells in drawing.states[-1]:  # a colour says whose the number was, and a sum has none
        assert {owner for _, owner in cells} <= ({None} if "reduce" in name else set(range(num_ranks)))
    colours = {text: owner for cells in drawing.states[0] for text, owner in cells}
    if "reduce" not in name:
        assert all(colours[text] == owner for cells in drawing.states[-1] for text, owner in cells)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("all_sum", [[1]], [[1]]), "the steps of 'all_sum' are not known; known are all_reduce, reduce_scatter"),
        (("gather", [[1], [2]], [[1, 2], []]), "gather needs its root, a rank from 0 to 1, got None"),
        (("all_reduce", [[1], [2, 3]], [[3], [3]]), "all_reduce needs rows of one length"),
        (
            ("all_reduce", [[1], [2]], [[3], [4]]),
            r"gives rank 1 \[3\], but it returned \[4\]; check the call",
        ),
    ],
)
def test_another_result_than_the_steps_give_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        collective_steps(*call)
