"""The drawing of the grid: every rank once, the group marked in more than colour, narrow enough for a phone."""

import re
import xml.etree.ElementTree as ET
from itertools import product

import pytest

from dualpipe_lab.topology import Topology
from dualpipe_lab.viz import RankGrid

SVG = "{http://www.w3.org/2000/svg}"
GRIDS = [
    Topology([("pp", 2), ("tp", 2), ("dp", 4)], edp=2),
    Topology([("dp", 3)]),
    Topology([("pp", 2), ("dp", 2), ("cp", 2), ("tp", 8)]),
    Topology([("dp", 2), ("tp", 12)]),
]


def test_every_rank_is_drawn_once_and_the_group_is_marked(subtests):
    for axis, topology in product(["dp", "model"], GRIDS):
        with subtests.test(axis=axis, topology=topology.shape):
            rank = topology.world_size - 1
            drawing = RankGrid(topology, axis, rank)
            group = list(topology.at(rank).ranks(axis))
            marked = sorted(int(number) for number in re.findall(r"\[(\d+)\]", str(drawing)))
            assert marked == group
            root = ET.fromstring(drawing.to_svg())
            boxes, cells = list(root.iter(f"{SVG}rect")), [text for text in root.iter(f"{SVG}text") if text.get("fill")]
            assert sorted(int(cell.text) for cell in cells) == list(range(topology.world_size))
            assert sorted(int(cell.text) for cell in cells if cell.get("font-weight")) == group
            filled = [cell.text for box, cell in zip(boxes, cells, strict=True) if box.get("fill") != "none"]
            assert sorted(map(int, filled)) == group


def test_the_cells_of_a_group_are_one_element_that_the_keyboard_reaches(subtests):
    for axis, topology in product(["dp", "model"], GRIDS):
        with subtests.test(axis=axis, topology=topology.shape):
            root = ET.fromstring(RankGrid(topology, axis).to_svg())
            found = []
            for element in root.findall(f"{SVG}g[@class='dp-rank-group']"):
                found.append(tuple(int(text.text) for text in element.findall(f"{SVG}text")))
                assert element.get("tabindex") == "0"
                assert element.find(f"{SVG}title").text == f"{axis} group: {', '.join(map(str, found[-1]))}"
            assert found == list(topology.groups(axis))


@pytest.mark.parametrize("topology", GRIDS, ids=str)
def test_it_fits_a_phone_and_tells_a_screen_reader(topology):
    drawing = RankGrid(topology, "dp")
    root = ET.fromstring(drawing.to_svg())
    width, height = float(root.get("width")), float(root.get("height"))
    assert width <= 360
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x")) + float(box.get("width")) <= width
        assert float(box.get("y")) + float(box.get("height")) <= height
    assert root.get("role") == "group"
    assert root.get("aria-label") == root.find(f"{SVG}title").text == drawing.title
    assert root.find(f"{SVG}desc").text == str(drawing)
    assert root.get("fill") == "currentColor"  # dark and light pages


def test_text_and_repr():
    drawing = RankGrid(Topology([("pp", 2), ("tp", 2), ("dp", 4)], edp=2), "edp", 5)
    assert str(drawing).splitlines() == [
        "pp 2 x tp 2 x dp 4 = 16 ranks; the edp group of rank 5: 5, 7",
        "pp 0  dp 0  dp 1  dp 2  dp 3",
        "tp 0     0     1     2     3",
        "tp 1     4   [5]     6   [7]",
        "pp 1  dp 0  dp 1  dp 2  dp 3",
        "tp 0     8     9    10    11",
        "tp 1    12    13    14    15",
    ]
    assert repr(drawing) == f"<RankGrid of {drawing.title}>"
    assert str(RankGrid(Topology([("dp", 2)]), "dp")).splitlines()[1:] == ["  dp 0  dp 1", "   [0]   [1]"]
