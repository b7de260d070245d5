"""The elements of a drawing, and what holds of all drawings."""

import xml.etree.ElementTree as ET

SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture, *args):
    """The drawing's elements: all lie inside, a screen reader has words for them, and two may stand on one page."""
    text = picture.to_svg(*args)
    root = ET.fromstring(text)
    assert text == picture.to_svg(*args)
    assert root.get("role") in ("img", "group")
    assert root.get("fill") == "currentColor"  # dark and light pages
    assert root.get("aria-label") == root.find(f"{SVG}title").text
    assert args or root.find(f"{SVG}desc").text == str(picture)
    assert not [node for node in root.iter() if node.get("id")]
    width, height = float(root.get("width")), float(root.get("height"))
    for x, y, wide, high in (place(box) for box in root.iter(f"{SVG}rect")):
        assert 0 <= x <= x + wide <= width + 0.1
        assert 0 <= y <= y + high <= height + 0.1
    return root


def place(box):
    """(x, y, width, height) of a rectangle."""
    return tuple(float(box.get(key)) for key in ("x", "y", "width", "height"))


def words(root):
    """Every text, in order."""
    return [text.text for text in root.iter(f"{SVG}text")]
