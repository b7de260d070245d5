"""Typical wrong answers and lazy cheats of the exercises on the asynchronous all-to-all."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "in_turn, forward, backward, saved = "

TYPICAL = {
    "async_all_to_all-1": {
        "one exchange": Bad(_PREDICT + "25, 29, 38, 20", "one there and one back"),
        "the job's time": Bad(_PREDICT + "37, 25, 38, 20", "the exchange is longer"),
        "the exchange's time": Bad(_PREDICT + "37, 29, 34, 20", "the job is the longer one"),
    },
    "async_all_to_all-3": {
        "waits for the first dispatch": Bad(
            [
                (
                    "    there0, there1 = issue_dispatch(x0, splits), issue_dispatch(x1, splits)\n"
                    "    back0 = combine_async(expert(there0.wait()), splits)\n",
                    "    there0 = issue_dispatch(x0, splits)\n"
                    "    back0 = combine_async(expert(there0.wait()), splits)\n"
                    "    there1 = issue_dispatch(x1, splits)\n",
                )
            ],
            "the forward takes 100 ms; 80 are enough",
        ),
        "one after the other": Bad(
            """
def moe(x0, x1, splits, expert):
    y0 = combine_async(expert(issue_dispatch(x0, splits).wait()), splits).wait()
    y1 = combine_async(expert(issue_dispatch(x1, splits).wait()), splits).wait()
    return y0, y1
""",
            "What runs between each issue and its wait?",
        ),
    },
}

CHEATS = {
    "async_all_to_all-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "in_turn = forward = backward = saved = Anything()", "must be a whole number"
        ),
    },
    "async_all_to_all-3": {
        "everything at home": Bad("def moe(x0, x1, splits, expert):\n    return expert(x0), expert(x1)", "y of microb"),
    },
}
