"""The drawing of the grid: every rank once, the group marked in more than colour, narrow enough for a phone."""

import re
from itertools import product

from scenes import SVG, drawn

from dualpipe_lab.topology import Topology
from dualpipe_lab.viz import RankGrid

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
            root = drawn(drawing)
            boxes, cells = list(root.iter(f"{SVG}rect")), [text for text in root.iter(f"{SVG}text") if text.get("fill")]
            assert sorted(int(cell.text) for cell in cells) == list(range(topology.world_size))
            assert sorted(int(cell.text) for cell in cells if cell.get("font-weight")) == group
            filled = [cell.text for box, cell in zip(boxes, cells, strict=True) if box.get("fill") != "none"]
            assert sorted(map(int, filled)) == group


def test_the_cells_of_a_group_are_one_element_that_the_keyboard_reaches(subtests):
    for axis, topology in product(["dp", "model"], GRIDS):
        with subtests.test(axis=axis, topology=topology.shape):
            root = drawn(RankGrid(topology, axis))
            found = []
            for element in root.findall(f"{SVG}g[@class='dp-rank-group']"):
                found.append(tuple(int(text.text) for text in element.findall(f"{SVG}text")))
                assert element.get("tabindex") == "0"
                assert element.find(f"{SVG}title").text == f"{axis} group: {', '.join(map(str, found[-1]))}"
            assert found == list(topology.groups(axis))
            assert float(root.get("width")) <= 360  # it fits a phone
            assert root.get("role") == "group"
            assert root.get("aria-label") == RankGrid(topology, axis).title


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
