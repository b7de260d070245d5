"""`transformer_block`: one layer of a transformer on two ranks, what each holds of it, and where the ranks must talk.

Chapter: book/start/memory, and the door of each part.  In: colours of the layer's parts, communication beside them.
Out: a `Diagram`.
"""

from collections.abc import Mapping

from dualpipe_lab.viz.diagram import Arrow, Box, Diagram

DENSE = ("norm", "q, k, v", "attention", "output", "norm 2", "gate, up", "down")
MIXTURE = (*DENSE[:5], "router", "experts")
_WIDTH, _GAP, _STEP = 8, 7, 2  # cells: of a rank, between ranks, from one part to the next


def transformer_block(
    title: str,
    colours: Mapping[str, str],
    communication: Mapping[str, str],
    texts: Mapping[str, str | tuple[str, str]] | None = None,
    ranks: tuple[str, str] = ("rank 0", "rank 1"),
    mixture: bool = False,
    legend: dict[str, str] | None = None,
) -> Diagram:
    """Draw one layer on two ranks, from top to bottom.

    Args:
        title: what the picture says.
        colours: of parts, by name; the others are outlines.  Parts are those of `DENSE`, or of `MIXTURE`.
        communication: what crosses between the ranks, by the part behind which it does; "in": before the layer.
        texts: the text of parts, where it is not their name; a pair for the two ranks.
        ranks: the names of the two.
        mixture: the feed-forward network is a mixture of experts.
        legend: the meaning of colours.

    Raises:
        ValueError: a part that the layer does not have.

    >>> picture = transformer_block("heads", {"q, k, v": "blue"}, {"output": "all-reduce", "down": "all-reduce"})
    >>> [str(arrow.text) for arrow in picture.arrows if arrow.both]
    ['all-reduce', 'all-reduce']
    """
    parts, texts = MIXTURE if mixture else DENSE, dict(texts or {})
    unknown = {*colours, *texts, *communication} - {*parts, "in"}
    if unknown:
        raise ValueError(f"{title}: a layer has the parts {', '.join(parts)}; got {', '.join(sorted(unknown))}")
    boxes, arrows = [], []
    height = _STEP * len(parts) + 1
    for number, rank in enumerate(ranks):
        left = number * (_WIDTH + _GAP)
        boxes.append(Box(rank, (left, 0), (_WIDTH, height), colour="frame"))
        for row, part in enumerate(parts):
            chosen = texts.get(part, part.removesuffix(" 2"))
            text = chosen if isinstance(chosen, str) else chosen[number]
            place, size = (left + 0.5, 1.3 + _STEP * row), (_WIDTH - 1, 1.3)
            boxes.append(Box(f"{part} {number}", place, size, text, colours.get(part, "plain")))
            if row:
                arrows.append(Arrow(f"{parts[row - 1]} {number}", f"{part} {number}", sides="bottom top"))
    for part, text in communication.items():
        first = part if part != "in" else parts[0]
        arrows.append(Arrow(f"{first} 0", f"{first} 1", text, "right left", "pink", both=True))
    return Diagram(title, boxes, arrows, legend)
