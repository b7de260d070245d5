"""Which shard lives where: every piece at its place and in its owner's colour, messages as bars, as text too."""

import pytest
from scenes import SVG, drawn, place, words

from dualpipe_lab.viz import ShardedTensor, Shards, Transition

BLUE, ORANGE = "#0072b2", "#e69f00"


def parts(picture):
    """(x, y, width, height, colour) of every part that a rank holds, relative to its tensor; tensor by tensor."""
    found, waiting = [], []
    for box in drawn(picture).findall(f"{SVG}rect"):
        if box.get("fill") != "none":
            waiting.append((place(box), box.get("fill")))
            continue
        x, y, width, height = place(box)
        for (left, top, wide, high), fill in waiting:
            found.append(((left - x) / width, (top - y) / height, wide / width, high / height, fill))
        waiting = []
    return [tuple(round(v, 1) if isinstance(v, float) else v for v in part) for part in found]


def test_rows_columns_and_pieces_lie_where_they_belong():
    rows = Shards("rows", 2, [ShardedTensor("W", (8, 4), dim=0)])
    assert parts(rows) == [(0, 0, 1, 0.5, BLUE), (0, 0.5, 1, 0.5, ORANGE)]
    columns = Shards("columns", 2, [ShardedTensor("y", (4, 8), dim=1)])
    assert parts(columns) == [(0, 0, 0.5, 1, BLUE), (0.5, 0, 0.5, 1, ORANGE)]
    pieces = Shards("halves", 2, [ShardedTensor("[gate; up]", (8, 4), 0, [((0, 2), (4, 6)), ((2, 4), (6, 8))])])
    assert [part[1] for part in parts(pieces)] == [0, 0.5, 0.2, 0.8]  # a quarter, at one digit


def test_what_all_hold_has_no_colour_and_a_replica_that_of_its_first_rank():
    assert [part[-1] for part in parts(Shards("x", 2, [ShardedTensor("x", (2, 2))]))] == ["currentColor"] * 2
    replicas = ShardedTensor("W_k", (4, 2), 0, [((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)])
    assert [part[-1] for part in parts(Shards("k", 4, [replicas]))] == [BLUE, BLUE, "#009e73", "#009e73"]
    summands = Shards("y", 2, [ShardedTensor("y", (2, 2), is_partial=True)])
    assert [part[-1] for part in parts(summands)] == [BLUE, ORANGE]
    assert summands.to_svg().count(">+<") == 2


def test_a_message_is_a_bar_through_all_ranks_and_the_rest_is_not():
    def bars(step):
        picture = Shards("s", 3, [ShardedTensor("x", (2, 2)), step, ShardedTensor("y", (2, 2))])
        return drawn(picture).findall(f"{SVG}path[@stroke-width='3']")

    assert not bars(Transition("copy", "none"))
    assert len(bars(Transition("copy", "all-reduce", 0, 96))) == 1
    assert len(bars(Transition("a", "b", 8, 96))) == 2


def test_everything_lies_inside_and_is_written_too():
    path = [
        ShardedTensor("x", (6, 5)),
        Transition("copy", "all-reduce & more", 0, 1536),
        ShardedTensor("W", (7, 5), dim=0),
    ]
    picture = Shards("rows < columns", 4, path)
    assert {"all-reduce & more", "1,536 B", "7 × 5"} <= set(words(drawn(picture)))
    text = str(picture).splitlines()
    assert [line.split("rows ")[1] for line in text[2:6]] == ["0-1", "2-3", "4-5", "6-6"]
    assert "nothing" in str(Shards("few", 3, [ShardedTensor("W", (2, 1), dim=0)]))


def test_a_path_that_does_not_alternate_is_refused():
    for path in (
        [],
        [Transition()],
        [ShardedTensor("x", (1, 1)), ShardedTensor("y", (1, 1))],
        [ShardedTensor("x", (1, 1)), Transition()],
    ):
        with pytest.raises(ValueError, match="tensors with one transition between each two"):
            Shards("wrong", 2, path)
