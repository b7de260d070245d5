"""Typical wrong answers and lazy cheats of the exercises on all-to-all."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "received, forward_bytes, backward_bytes, count_bytes = "

TYPICAL = {
    "all_to_all-1": {
        "its own row": Bad(_PREDICT + "8, 80, 64, 16", "it receives a column"),
        "sends to itself": Bad(_PREDICT + "7, 128, 64, 16", "stay where they are"),
        "back as forth": Bad(_PREDICT + "7, 80, 80, 16", "that is the forward"),
        "counts itself": Bad(_PREDICT + "7, 80, 64, 24", "for oneself does not travel"),
    },
    "all_to_all-2": {
        "the page's, without room": Bad(
            """
def dispatch(x, to, room):
    sends = to.bincount(minlength=comm.get_world_size())
    receives = torch.empty_like(sends)
    comm.all_to_all_single(receives, sends)
    return AllToAll.apply(x[to.argsort(stable=True)], sends.tolist(), receives.tolist())
""",
            "got shape [2, 3], needs [1, 3]",
        ),
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
        "senders are not told": Bad(
            [
                (
                    "AllToAll.apply(x[torch.cat(rows)], granted.tolist()",
                    "AllToAll.apply(x[to.argsort(stable=True)], wanted.tolist()",
                )
            ],
            "rank(s), table",
        ),
        "room for each source": Bad(
            [("(room - before).clamp(min=0)", "torch.full_like(offered, room)")],
            "got shape [2, 3], needs [1, 3]",
        ),
        "counts its own": Bad([("offered.cumsum(0) - offered", "offered.cumsum(0)")], "needs [1, 3]"),
        "below zero": Bad([("(room - before).clamp(min=0)", "room - before")], "rank(s), table"),
        "the last rows": Bad([("nonzero()[:n, 0]", "nonzero()[len(to == rank) - n :, 0]")], "rank(s), table"),
        "not a number": Bad([("return AllToAll.apply(", "return float('nan') * AllToAll.apply(")], "has rows nan"),
        "not sorted": Bad([("x[torch.cat(rows)]", "x[torch.cat(rows).sort().values]")], "should have"),
        "backwards": Bad([("nonzero()[:n, 0]", "nonzero()[:n, 0].flip(0)")], "should have"),
        "rows are two-dimensional": Bad(
            [("AllToAll.apply(x[torch.cat(rows)],", "AllToAll.apply(x[torch.cat(rows)].flatten(1),")], "rows of shape"
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
        "early return of the idle": Bad(
            [
                (
                    "    rows = work(",
                    "    if splits.num_received == 0 and sum(sends) == 0:\n        return x\n    rows = work(",
                )
            ],
            "all_to_all_single",
        ),
        "works on rows alone": Bad(
            [
                (
                    "    rows = work(library_dispatch(x, splits))\n",
                    "    rows = library_dispatch(x, splits)\n    if len(rows):\n        rows = work(rows)\n",
                )
            ],
            "table [[0, 3], [0, 0]]",
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
        "all know all": Bad(
            """
def dispatch(x, to, room):
    rank, size = comm.get_rank(), comm.get_world_size()
    known = comm.all_gather_object((to.bincount(minlength=size).tolist(), room))
    taken = [[0] * size for _ in range(size)]
    for j in range(size):
        left = known[j][1]
        for r in range(size):
            taken[r][j] = min(left, known[r][0][j])
            left -= taken[r][j]
    rows = [(to == j).nonzero()[:n, 0] for j, n in enumerate(taken[rank])]
    return AllToAll.apply(x[torch.cat(rows)], taken[rank], [row[rank] for row in taken])
""",
            "bytes through comm",
        ),
    },
    "all_to_all-3": {
        "stays at home": Bad(
            "def round_trip(x, sends, work):\n    return work(x)",
            "the work on its rows was done by ranks 0 0, should be 0 1",
        ),
    },
}
