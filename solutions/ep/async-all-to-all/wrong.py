"""Typical wrong answers and lazy cheats of the exercises on the asynchronous all-to-all."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "in_turn, forward, backward, saved = "

TYPICAL = {
    "async_all_to_all-1": {
        "one exchange": Bad(_PREDICT + "25, 29, 38, 20", "one there and one back"),
        "the job's time": Bad(_PREDICT + "37, 25, 38, 20", "the exchange is longer"),
        "the exchange's time": Bad(_PREDICT + "37, 29, 34, 20", "the job is the longer one"),
        "forward alone": Bad(_PREDICT + "37, 29, 38, 8", "the backward saves too"),
    },
    "async_all_to_all-2": {
        "waits in the issue": Bad(
            [("        return x.new_empty(0)", "        travel.arriving.wait()\n        return x.new_empty(0)")],
            "nothing ran beside the exchange",
        ),
        "backward in one piece": Bad(
            [
                (
                    "        return grad.new_empty(0), None",
                    "        ctx.travel.arriving.wait()\n        return grad.new_empty(0), None",
                )
            ],
            "who waits for the exchange of the gradient",
        ),
        "not transposed": Bad([("splits.transposed)", "splits)")], "must be 2 numbers that sum to"),
        "no gradient": Bad(
            [("return ctx.travel.arriving.wait(), None", "return ctx.travel.arriving.wait() * 0, None")], "dx is"
        ),
    },
    "async_all_to_all-3": {
        "before the issue": Bad(
            [
                (
                    "    travelling = issue_dispatch(x, splits)\n    other = shared(x)\n",
                    "    other = shared(x)\n    travelling = issue_dispatch(x, splits)\n",
                )
            ],
            "the forward takes 70 ms; 50 are enough",
        ),
        "as it was": Bad(
            [
                (
                    "    other = shared(x)\n    rows = expert(travelling.wait())\n",
                    "    rows = expert(travelling.wait())\n    other = shared(x)\n",
                )
            ],
            "What runs between each issue and its wait?",
        ),
        "forgotten": Bad([(".wait() + other", ".wait()")], "both experts' results"),
    },
}

CHEATS = {
    "async_all_to_all-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "in_turn = forward = backward = saved = Anything()", "must be a whole number"
        ),
    },
    "async_all_to_all-2": {
        "the library's own": Bad("start_dispatch = issue_dispatch", "the library's own is switched off"),
    },
    "async_all_to_all-3": {
        "everything at home": Bad(
            "def moe(x, splits, expert, shared):\n    return expert(x) + shared(x)", "both experts' results"
        ),
        "no gradient of the shared expert": Bad([("other = shared(x)", "other = shared(x.detach())")], "dx is"),
    },
}
