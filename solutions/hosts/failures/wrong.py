"""Typical wrong answers and lazy cheats of the exercises on failures."""

from bad_answer import Bad

TYPICAL = {
    "failures-3": {
        "only larger numbers": Bad(
            [("number != numbers[rank]", "(number or 0) > (numbers[rank] or 0)")], "is started again and counts from 1"
        ),
        "never beaten is well": Bad([("for rank in ranks if", "for rank in beats if")], "never beats"),
        "absolute difference": Bad(
            """
def silent(looks, ranks, limit):
    return [[r for r in ranks if abs(now - beats.get(r, (0, -1e9))[1]) > limit] for now, beats in looks]
""",
            "60 s behind",
        ),
    },
}

CHEATS = {
    "failures-3": {
        "nobody": Bad("def silent(looks, ranks, limit):\n    return [[] for _ in looks]", "got [], expected [1]"),
    },
}
