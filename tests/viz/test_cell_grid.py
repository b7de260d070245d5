"""Grids of cells: colours by kind, counts, text, and what cannot be drawn is named."""

import pytest
from scenes import SVG, drawn, words

from dualpipe_lab.viz.cell_grid import CellGrid

CAUSAL = [["whole", None, None], ["whole", ("masked", "½"), None], ["whole", "whole", ("masked", "½")]]


def cells(picture, name, columns):
    """Row, column and colour of every cell that is filled; the legend's boxes are 11 px wide."""
    boxes = [box for box in drawn(picture, name).findall(f"{SVG}rect") if box.get("stroke")]
    return [
        (*divmod(number, columns), box.get("fill")) for number, box in enumerate(boxes) if box.get("fill") != "none"
    ]


def test_a_kind_has_one_colour_in_all_grids():
    picture = CellGrid("two", {"causal": CAUSAL, "other": [["masked", "whole"]]}, "queries", "keys")
    blue, orange = "#0072b2", "#e69f00"
    assert cells(picture, "causal", 3) == [
        (0, 0, blue), (1, 0, blue), (1, 1, orange), (2, 0, blue), (2, 1, blue), (2, 2, orange),
    ]  # fmt: skip
    assert cells(picture, "other", 2) == [(0, 0, orange), (0, 1, blue)]


def test_counts_and_text():
    picture = CellGrid("a < b", {"causal": CAUSAL}, "queries", "keys")
    assert picture.count("causal") == {"whole": 4, "masked": 2}
    assert str(picture).splitlines() == [
        "a < b", "causal: 4 whole, 2 masked, 3 nothing", "a . .", "a b .", "a a b",
        "a: whole, b: masked; rows: queries, columns: keys",
    ]  # fmt: skip
    texts = words(drawn(picture, "causal"))
    assert texts.count("½") == 2
    assert {"whole: 4", "masked: 2", "causal"} <= set(texts)
    assert "a &lt; b" in picture._repr_html_()


def test_every_size_lies_inside():
    for size in (1, 3, 16, 64):
        picture = CellGrid("square", {"all of them": [["seen"] * size] * size}, "queries", "keys")
        assert len(drawn(picture, "all of them").findall(f"{SVG}rect")) == size**2 + 1  # and the legend


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ({}, "rows of one length each, got {}"),
        ({"a": []}, r"got \{'a': \[\]\}"),
        ({"a": [["x"], ["x", "x"]]}, r"got \{'a': \[1, 2\]\}"),
        ({"a": [[str(n) for n in range(9)]]}, "colours for 8 kinds"),
    ],
)
def test_what_cannot_be_drawn_is_named(grids, message):
    with pytest.raises(ValueError, match=message):
        CellGrid("m", grids, "queries", "keys")
