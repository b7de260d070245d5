"""Typical wrong answers and lazy cheats of the exercises on all-to-all."""

from bad_answer import Bad

TYPICAL = {
    "all_to_all-4": {
        "sizes not swapped": Bad(
            [("(dy, receives, sends, ranks, BACKWARD)", "(dy, sends, receives, ranks, BACKWARD)")],
            "table [[1, 2, 0], [0, 1, 2], [2, 0, 1]], rows of shape (3,): rank 0: number 3 of dx is the gradient",
        ),
        "received when waited for": Bad(
            [
                ("works.append(irecv(room, peer, tag))", "works.append(Later(room, peer, tag))"),
                (
                    "def start_exchange(",
                    "class Later:\n    def __init__(self, *to):\n        self.to = to\n\n"
                    "    def wait(self):\n        irecv(*self.to).wait()\n\n\ndef start_exchange(",
                ),
            ],
            "receives of 0 bytes are under way, of 48 that come",
        ),
        "one tag for both ways": Bad([("FORWARD, BACKWARD = 1, 2", "FORWARD, BACKWARD = 1, 1")], "tells them apart"),
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
    "all_to_all-4": {
        "everything to everybody": Bad(
            [
                (
                    "    return out, works\n",
                    "    for peer in ranks:\n        if peer != get_rank():\n"
                    "            works += [isend(x.sum()[None], peer, 9), irecv(x.new_empty(1), peer, 9)]\n"
                    "    return out, works\n",
                )
            ],
            "its rows for others are",
        ),
        "torch's own": Bad(
            "import torch.distributed as dist\ndef start_exchange(x, sends, receives, ranks, tag):\n"
            "    out = x.new_empty(sum(receives), *x.shape[1:])\n"
            "    return out, [dist.all_to_all_single(out, x, receives, sends, async_op=True)]\n"
            "class Exchange:\n    apply = start_exchange",
            "torch.distributed is off in every part",
        ),
    },
    "all_to_all-3": {
        "stays at home": Bad(
            "def round_trip(x, sends, work):\n    return work(x)",
            "the work on its rows was done by ranks 0 0, should be 0 1",
        ),
    },
}
