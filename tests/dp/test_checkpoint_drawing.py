"""The drawing of who reads what: every byte that was read is in it, at its place."""

import re
import xml.etree.ElementTree as ET

from dualpipe_lab.dp.checkpoint import Read, ReadsDrawing

SVG = "{http://www.w3.org/2000/svg}"
SIZES = {"a.safetensors": 100, "b.safetensors": 60}
READS = [
    [Read("a.safetensors", "v", 20, 50), Read("a.safetensors", "w", 10, 20)],
    [Read("b.safetensors", "w", 10, 60), Read("a.safetensors", "w", 60, 100)],
    [],
]


def test_ranges_that_touch_are_one_and_the_text_has_them_all():
    assert str(ReadsDrawing(SIZES, READS)).splitlines() == [
        "2 files to 3 ranks",
        "rank 0 reads 40 bytes: a 10-50",
        "rank 1 reads 90 bytes: a 60-100, b 10-60",
        "rank 2 reads 0 bytes: ",
    ]


def test_heights_are_bytes_and_everything_is_inside():
    root = ET.fromstring(ReadsDrawing(SIZES, READS).to_svg())
    _, _, width, height = map(float, root.get("viewBox").split())
    boxes = [{key: box.get(key) for key in ("x", "y", "width", "height", "fill")} for box in root.iter(f"{SVG}rect")]
    outlines = [float(box["height"]) for box in boxes if box["fill"] == "none"]
    assert abs(outlines[0] / outlines[1] - 100 / 60) < 0.01
    per_byte = outlines[0] / 100
    read = [round(float(box["height"]) / per_byte) for box in boxes if box["fill"] != "none"]
    assert sorted(read) == sorted(2 * [40, 40, 50])  # once in the file, once on the rank
    for box in boxes:
        assert 0 <= float(box["x"]) <= width - float(box["width"])
        assert 0 <= float(box["y"]) <= height - float(box["height"])
    titles = [title.text for path in root.iter(f"{SVG}path") for title in path]
    assert titles[0] == "bytes 10 to 50 of a to rank 0"
    assert len({path.get("fill") for path in root.iter(f"{SVG}path")}) == 2
    assert all(re.match(r"M34 ", path.get("d")) for path in root.iter(f"{SVG}path"))
