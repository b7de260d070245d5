"""The pictures of what ranks hold: well-formed, complete, coloured by origin, drawn from real ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import SVG, drawn

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.topology import Topology
from dualpipe_lab.viz import RankGrid
from dualpipe_lab.viz.collectives import Gallery, RankValues

BLUE, ORANGE = "#0072b2", "#e69f00"


def cells(picture):
    """(text, fill, is outlined) of every cell, state by state and rank by rank."""
    root = drawn(picture)
    boxes = root.findall(f"{SVG}rect")
    texts = [text.text for text in root.findall(f"{SVG}text") if text.get("fill")]
    assert len(boxes) == len(texts)
    return [(text, box.get("fill"), box.get("stroke") is not None) for text, box in zip(texts, boxes, strict=True)]


def test_a_cell_has_the_colour_of_the_rank_that_held_its_number_first():
    picture = RankValues("broadcast", [("before", [[1], [2]]), ("after", [[1], [1]])])
    assert cells(picture) == [("1", BLUE, False), ("2", ORANGE, False), ("1", BLUE, False), ("1", BLUE, True)]


def test_a_sum_and_a_number_of_two_ranks_have_no_colour():
    picture = RankValues("sum", [("before", [[1, 5], [2, 5]]), ("after", [[3], [3]])])
    assert [fill for _, fill, _ in cells(picture)] == [BLUE, "currentColor", ORANGE, *["currentColor"] * 3]


def test_real_ranks_are_drawn_as_they_are():
    def fn(rank, world_size):
        x = 10 * rank + torch.arange(3)
        before = x.tolist()
        comm.all_reduce(x)
        return before, x.tolist()

    before, after = zip(*lab.launch(fn, 3), strict=True)
    picture = RankValues("all_reduce", [("before", before), ("after", after)], note="note")
    assert [text for text, _, _ in cells(picture)] == [
        *["0", "1", "2", "10", "11", "12", "20", "21", "22"],
        *["30", "33", "36"] * 3,
    ]
    assert str(picture).splitlines()[:3] == [
        "all_reduce  note",
        "        before    after",
        "rank 0  0 1 2     30 33 36",
    ]


def test_a_rank_that_holds_nothing_is_drawn_as_a_dash():
    picture = RankValues("reduce", [("before", [[1], [2]]), ("after", [[3], []])])
    assert str(picture).splitlines()[-1] == "rank 1  2       -"
    assert "–" in picture.to_svg()


@given(st.lists(st.lists(st.integers(-999, 9999), max_size=9), min_size=1, max_size=9), st.integers(1, 5))
def test_every_number_is_drawn_once_and_inside_the_picture(rows, count):
    picture = RankValues("any <name> & more", [(f"step {i}", rows) for i in range(count)])
    found = cells(picture)
    assert [text for text, _, _ in found] == [str(value) for row in rows for value in row] * count
    assert not any(outlined for _, _, outlined in found)
    assert drawn(picture).get("aria-label") == f"any <name> & more: what each of {len(rows)} ranks holds"
    assert 'tabindex="0"' in picture._repr_html_()


def test_states_must_agree_on_the_ranks():
    with pytest.raises(ValueError, match=r"one row per rank, got \[2, 1\] rows"):
        RankValues("x", [("before", [[1], [2]]), ("after", [[1]])])
    with pytest.raises(ValueError, match="one row per rank"):
        RankValues("x", [])


def test_a_gallery_shows_all_of_its_pictures_and_its_repr_is_the_same_in_every_run():
    picture = RankValues("sum", [("before", [[1], [2]]), ("after", [[3], [3]])])
    assert repr(picture) == "<RankValues 'sum': 2 ranks, 2 states>"
    grid = RankGrid(Topology([("dp", 2), ("tp", 2)]), "tp", 3)
    assert repr(Gallery([picture, grid])) == "<Gallery of 2 pictures>"
    assert Gallery([picture, grid])._repr_html_().count("<svg") == 2
    assert str(Gallery([picture, picture])).count("rank 0") == 2
