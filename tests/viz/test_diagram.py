"""Boxes and arrows: everything lies inside, arrows meet the sides of boxes, and what cannot be drawn is named."""

import re

import pytest
from scenes import SVG, drawn, words

from dualpipe_lab.viz import Arrow, Box, Diagram, transformer_block


def two(at, **arrow):
    boxes = [Box("a", (5, 5), (4, 2), colour="blue"), Box("b", at, (4, 2), colour="orange")]
    return drawn(Diagram("two", boxes, [Arrow("a", "b", "x < y", **arrow)]))


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    ("at", "tip"),
    [((12, 5), (248, 152)), ((0, 5), (88, 152)), ((5, 9), (148, 212)), ((5, 0), (148, 72)), ((12, 20), (288, 432))],
)
def test_an_arrow_ends_at_the_side_that_faces_its_start(at, tip):
    points = two(at).find(f"{SVG}polygon").get("points").split(" ")[0].split(",")
    assert max(abs(float(found) - expected) for found, expected in zip(points, tip, strict=True)) <= 1


def test_sides_may_be_chosen_and_both_ends_have_a_head():
    root = two((12, 5), sides="bottom bottom", both=True)
    tips = [head.get("points").split(" ")[0] for head in root.findall(f"{SVG}polygon")]
    assert tips == ["288,173", "148,173"]


def test_text_on_a_colour_can_be_read(subtests):
    for colour in ["blue", "orange", "green", "pink", "sky", "yellow", "red", "grey"]:
        with subtests.test(colour=colour):
            root = drawn(Diagram("one", [Box("a", (0, 0), (4, 2), colour=colour)]))
            fill, ink = root.find(f"{SVG}rect").get("fill"), root.findall(f"{SVG}text")[1].get("fill")
            low, high = sorted(map(luminance, (fill, ink)))
            assert (high + 0.05) / (low + 0.05) >= 4.5


def test_everything_lies_inside_and_the_text_is_there():
    picture = transformer_block(
        "a & b", {"experts": "green"}, {"router": "tokens"}, {"experts": ("0, 1", "2, 3")},
        mixture=True, legend={"green": "half each"},
    )  # fmt: skip
    root = drawn(picture)
    assert {"a & b", "tokens", "0, 1", "2, 3", "half each"} <= set(words(root))
    assert "router 0 <-> router 1: tokens" in root.find(f"{SVG}desc").text
    assert not re.search(r"nan|inf", picture.to_svg())


def test_a_bow_below_the_boxes_lies_inside():
    boxes = [Box("a", (0, 0), (4, 2)), Box("b", (20, 0), (4, 2))]
    flat, bow = (drawn(Diagram("t", boxes, [Arrow("a", "b", sides=side)])) for side in (None, "bottom bottom"))
    assert float(bow.get("height")) - float(flat.get("height")) == pytest.approx(28, abs=3)


BOX = Box("a", (0, 0), (4, 2))


def test_what_cannot_be_drawn_is_named(subtests):
    for boxes, arrows, message in [
        ([], [], "names that differ, got \\[\\]"),
        ([BOX, BOX], [], "names that differ, got \\['a', 'a'\\]"),
        ([BOX], [Arrow("a", "b")], "no box has the name 'b'; there are a"),
        ([BOX], [Arrow("a", "a", sides="up down")], "such as 'right left', got 'up down'"),
        ([BOX], [Arrow("a", "a", colour="blu")], "arrows are blue, .* got 'blu'"),
        ([Box("a", (0, 0), (4, 2), colour="violet")], [], "boxes are blue, .* got 'violet'"),
        ([Box("a", (-1, 0), (4, 2))], [], "at least 0"),
        ([Box("a", (0, 0), (2, 1), "far too long")], [], "needs about 4.0 x 0.8 cells, and the box has 2 x 1"),
    ]:
        with (
            subtests.test(boxes=boxes, arrows=arrows, message=message),
            pytest.raises(ValueError, match=message),
        ):
            Diagram("d", boxes, arrows)


def test_a_part_that_a_layer_lacks_is_named():
    with pytest.raises(ValueError, match=r"has the parts norm, .* got experts"):
        transformer_block("t", {"experts": "blue"}, {})
