"""Typical wrong answers and lazy cheats of the exercises on all-to-all."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "received, forward_bytes, backward_bytes, count_bytes = "

TYPICAL = {
    "all_to_all-1": {
        "its own row": Bad(_PREDICT + "8, 80, 64, 16", "it receives a column"),
        "sends to itself": Bad(_PREDICT + "7, 128, 64, 16", "stay where they are"),
        "back as forth": Bad(_PREDICT + "7, 80, 80, 16", "that is the forward"),
    },
    "all_to_all-2": {
        "cut on arrival": Bad(
            """
def dispatch(x, to, room):
    sends = to.bincount(minlength=comm.get_world_size())
    receives = torch.empty_like(sends)
    comm.all_to_all_single(receives, sends)
    return AllToAll.apply(x[to.argsort(stable=True)], sends.tolist(), receives.tolist())[:room]
""",
            "A refused row does not travel",
        ),
        "nothing to do here": Bad(
            [
                (
                    "    rows = [(to",
                    "    if sum(granted) + sum(taken) == 0:\n        return x[:0]\n    rows = [(to",
                )
            ],
            "all_to_all_single",
        ),
        "no gradient": Bad([("x[torch.cat(rows)]", "x[torch.cat(rows)].detach()")], "no gradient comes back"),
    },
    "all_to_all-3": {
        "same splits": Bad(
            [("combine(rows, splits)", "library_dispatch(rows, splits)")], "must be 2 numbers that sum to"
        ),
        "early return": Bad(
            [("    splits = ex", "    if sum(sends) == 0:\n        return x\n    splits = ex")],
            "all_to_all_single",
        ),
        "works on rows alone, in their width": Bad(
            [
                (
                    "    rows = work(library_dispatch(x, splits))\n",
                    "    rows = library_dispatch(x, splits)\n"
                    "    rows = work(rows) if len(rows) else torch.cat([rows, rows], 1)\n",
                )
            ],
            "has the gradient None there",
        ),
    },
}

CHEATS = {
    "all_to_all-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "received = forward_bytes = backward_bytes = count_bytes = Anything()",
            "must be a whole number",
        ),
    },
    "all_to_all-2": {
        "the library's own": Bad(
            [
                (
                    "AllToAll.apply(x[torch.cat(rows)], granted.tolist(), taken.tolist())",
                    "library_dispatch(x[torch.cat(rows)], exchange_splits(granted.tolist()))",
                )
            ],
            "the library's own is switched off",
        ),
    },
    "all_to_all-3": {
        "stays at home": Bad(
            "def round_trip(x, sends, work):\n    return work(x)",
            "the work on its rows was done by ranks 0 0, should be 0 1",
        ),
    },
}
