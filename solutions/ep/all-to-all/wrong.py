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
        "not swapped": Bad(
            [
                ("sum(ctx.sends)", "sum(ctx.receives)"),
                ("grad.contiguous(), ctx.sends, ctx.receives", "grad.contiguous(), ctx.receives, ctx.sends"),
            ],
            "must be 2 numbers that sum to",
        ),
        "counts as sent": Bad([("receives.tolist()", "sends.tolist()")], "2 rank(s), table [[2, 1], [0, 2]]: rank"),
        "not a number": Bad([("        return y\n", "        return y * float('nan')\n")], "has rows nan"),
        "not sorted": Bad([("x[to.argsort(stable=True)]", "x")], "has rows 0:0 0:2, should have 0:0 0:1"),
        "backwards": Bad([("argsort(stable=True)", "argsort(descending=True)")], "should have"),
        "rows have columns": Bad([("*x.shape[1:]", "x.shape[1]")], "rows of shape []"),
        "rows have two dimensions": Bad(
            [("*x.shape[1:]", "*x.shape[1:2]"), ("*grad.shape[1:]", "*grad.shape[1:2]")], "rows of shape [2, 2]"
        ),
        "nothing to do here": Bad(
            [
                (
                    "        comm.all_to_all_single(y, x.contiguous(), receives, sends)",
                    "        if sum(sends) + sum(receives):\n"
                    "            comm.all_to_all_single(y, x.contiguous(), receives, sends)",
                )
            ],
            "all_to_all_single",
        ),
        "strided gradient": Bad([("grad.contiguous()", "grad")], "needs a contiguous tensor"),
        "no gradient": Bad(
            [
                (
                    "return AllToAll.apply(by_destination,",
                    "return AllToAll.apply(by_destination.detach(),",
                )
            ],
            "no gradient comes back",
        ),
        "gradient as it came": Bad(
            [
                (
                    "comm.all_to_all_single(dx, grad.contiguous(), ctx.sends, ctx.receives)",
                    "dx.copy_(grad[:1].expand_as(dx))",
                )
            ],
            "got the gradients of rows",
        ),
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
            "def dispatch(x, to):\n"
            "    sends = to.bincount(minlength=comm.get_world_size()).tolist()\n"
            "    return library_dispatch(x[to.argsort(stable=True)], exchange_splits(sends))",
            "the library's own is switched off",
        ),
        "torch's own": Bad(
            """
def dispatch(x, to):
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_to_all_single_autograd
    sends = to.bincount(minlength=dist.get_world_size())
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends)
    x = x[to.argsort(stable=True)]
    return 1 * all_to_all_single_autograd(x, receives.tolist(), sends.tolist(), dist.group.WORLD)
""",
            "sent 0 bytes through comm",
        ),
    },
    "all_to_all-3": {
        "stays at home": Bad(
            "def round_trip(x, sends, work):\n    return work(x)",
            "the work on its rows was done by ranks 0 0, should be 0 1",
        ),
    },
}
