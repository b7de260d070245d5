"""Typical wrong answers and lazy cheats of the exercises on axes and links."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "along_tp, along_dp, along_pp, cut_tokens, pp_outside, dp_outside = "

TYPICAL = {
    "links-1": {
        "all layers": Bad(_PREDICT + "768, 6, 16, 240, 384, 320", "4 of the 16 layers"),
        "whole matrices": Bad(_PREDICT + "192, 24, 16, 240, 384, 320", "tp cuts the gradients"),
        "one direction": Bad(_PREDICT + "192, 6, 8, 240, 384, 320", "two neighbours"),
        "same bytes": Bad(_PREDICT + "192, 6, 16, 192, 384, 320", "the second gather"),
        "a ring of stages": Bad(_PREDICT + "192, 6, 16, 240, 512, 320", "three borders"),
        "pp inside": Bad(_PREDICT + "192, 6, 16, 240, 384, 192", "two of the four stages"),
    },
    "links-2": {
        "open rings": Bad([("if is_last and name in lines", "if is_last")], "the ring closes"),
        "closed lines": Bad([("if is_last and name in lines", "if False")], "a line ends"),
        "read from the left": Bad(
            [("    found, stride = ", "    axes = axes[::-1]\n    found, stride = ")], "innermost"
        ),
        "whole axes": Bad(
            """
def crossing(axes, sent, lines, ranks_per_node):
    world, inner, found = 1, 1, {}
    for _, size in axes:
        world *= size
    for name, size in reversed(axes):
        inner *= size
        found[name] = world * sent[name] if inner > ranks_per_node else 0
    return found
""",
            "expected",
        ),
        "a list": Bad([("return found", "return list(found.values())")], "return a dict"),
        "one group": Bad([("for rank in range(world_size)", "for rank in range(stride * size)")], "expected"),
    },
    "links-3": {
        "by bytes": Bad('order = ["pp", "dp_out", "dp_in", "cp", "tp"]', "= 2.37 s"),
        "tp in racks": Bad('order = ["pp", "dp_out", "tp", "cp", "dp_in"]', "legal: "),
        "from the other side": Bad('order = ["tp", "dp_in", "cp", "dp_out", "pp"]', "legal: "),
        "one data axis": Bad('order = ["pp", "dp", "cp", "tp"]', "stands in the list once"),
    },
}

CHEATS = {
    "links-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "along_tp = along_dp = along_pp = cut_tokens = pp_outside = dp_outside = Anything()",
            "must be a whole number",
        ),
    },
    "links-2": {
        "nothing crosses": Bad(
            "def crossing(axes, sent, lines, ranks_per_node):\n    return dict.fromkeys(sent, 0)", "expected"
        ),
    },
    "links-3": {
        "only the slow ones": Bad('order = ["dp_in", "tp"]', "stands in the list once"),
        "twice": Bad('order = ["pp", "dp_out", "cp", "dp_in", "tp", "tp"]', "stands in the list once"),
    },
}
