"""Typical wrong answers and lazy cheats of the exercises on DualPipe."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "bubble_of_rank_2, bubble_of_rank_0, published, peak"
QUEUE = "def backwards(words, weights, grads, inputs, dys):\n"

TYPICAL = {
    "dualpipe-1": {
        "published everywhere": Bad(f"{NAMES} = 22, 22, 22, 7", "for t_F = t_I >= t_W only"),
        "three terms": Bad(f"{NAMES} = 16, 14, 22, 7", "one more term"),
        "pairs gain nothing": Bad(f"{NAMES} = 20, 20, 22, 7", "two less than F and B"),
        "all ranks alike": Bad(f"{NAMES} = 18, 18, 22, 7", "rank 2 has 7 pairs"),
        "more pairs outside": Bad(f"{NAMES} = 18, 20, 22, 7", "each pair saves"),
        "three W in gaps": Bad(f"{NAMES} = 18, 16, 26, 7", "published 26"),
        "peak of 1F1B": Bad(f"{NAMES} = 18, 16, 22, 6", "adds one"),
    },
    "dualpipe-2": {
        "no step 3": Bad(
            [("    for _ in range(inside):  # step 3\n", "    for _ in range(0):  # step 3\n")],
            "DualPipe, 4 ranks, 8 microbatches: rank 0, action 5, in step 3",
        ),
        "whole backwards in step 3": Bad(
            [
                (
                    "    for _ in range(inside):  # step 3\n        if room:",
                    "    for _ in range(inside):\n        if room < 0:",
                )
            ],
            "in step 3: 3B4, expected 3I4",
        ),
        "the page's rows": Bad(
            [("waiting = min(room, outside)", "room = waiting = outside")],
            "DualPipe, 2 ranks, 4 microbatches, room for 0 waiting: rank 0, action 7, in step 6",
        ),
        "the first of step 6 wait": Bad(
            [("row.B if i < 2 * outside - waiting else row.I", "row.I if outside <= i < outside + waiting else row.B")],
            "in step 6",
        ),
        "all of step 6": Bad(
            [("row.B if i < 2 * outside - waiting else row.I", "row.I if room else row.B")], "in step 6"
        ),
        "split although there is no room": Bad(
            [
                (
                    "    for _ in range(inside):  # step 3\n        if room:",
                    "    for _ in range(inside):\n        if True:",
                )
            ],
            "room for 0 waiting: rank 0, action 5, in step 3",
        ),
        "all backwards whole": Bad(
            [("row.B if i < 2 * outside - waiting else row.I", "row.B")], "W after 0B1: no I has left a weight gradient"
        ),
        "flow 0 first in step 6": Bad([("backward(1 - i % 2)", "backward(i % 2)")], "in step 6"),
        "all weights at the end": Bad(
            [
                ("            row.W()\n            row.I(0)\n", "            row.I(0)\n"),
                ("range(waiting):", "range(waiting + inside * (room > 0)):"),
            ],
            "in step 7",
        ),
        "no pairs in step 5": Bad(
            [
                (
                    "        row.B(1)\n        row.pair(1, 0)\n    waiting",
                    "        row.B(1)\n        row.F(1)\n        row.B(0)\n    waiting",
                )
            ],
            "in step 5",
        ),
        "DualPipeV on p stages": Bad(
            [("(2 * num_ranks - 1 - rank, 0)", "(num_ranks - 1 - rank, 0)")],
            "DualPipeV, 1 rank, 2 microbatches: rank 0",
        ),
        "DualPipeV in half the positions": Bad(
            [("rank, num_ranks, num_microbatches\n", "rank, num_ranks // 2, num_microbatches // 2\n")], "DualPipeV"
        ),
    },
    "dualpipe-3": {
        "a microbatch too few": Bad([(" 0I2 0W2", "")], "the validator says"),
        "W before I": Bad([("0I2 0W2", "0W2 0I2")], "the validator says"),
        "whole backwards": Bad(
            [("3I3 3W3", "3B3"), ("3I5 3W5", "3B5"), ("0I2 0W2", "0B2"), ("0I1 0W1", "0B1")], "valid, 21"
        ),
        "weights first": Bad([("2I3 1I0 2W3", "2I3 2W3 1I0")], "ticks with 4 activations"),
    },
    "dualpipe-4": {
        "flat gradients": Bad(
            [("sent.append(dy @ weights[flow])", "sent.append((dy @ weights[flow]).flatten())")], "has shape"
        ),
        "late binding": Bad(
            QUEUE
            + """
    done, waiting, sent = [0, 0], [], []
    for word in words:
        if word == "W":
            waiting.pop(0)()
            continue
        flow = int(word[1])
        x, dy = inputs[flow][done[flow]], dys[flow][done[flow]]
        done[flow] += 1
        sent.append(dy @ weights[flow])
        if word[0] == "I":
            waiting.append(lambda: grads[flow].add_(dy.T @ x))
        else:
            grads[flow].add_(dy.T @ x)
    return sent
""",
            "after I0 I0 W: W added the weight gradient of flow 0's microbatch 1, expected that of",
        ),
        "newest first": Bad([("waiting.pop(0)", "waiting.pop()")], "the oldest that waits"),
        "W at once": Bad(
            [('if kind == "I":', 'if kind == "none":'), ("waiting.pop(0)", "(0, dy * 0, x)")], "an I adds no"
        ),
        "replaces": Bad(
            [("grads[flow] += dy.T @ x", "grads[flow].copy_(dy.T @ x)")], "changed by no microbatch's weight gradient"
        ),
        "B takes the oldest": Bad(
            [
                (
                    "        else:\n            grads[flow] += dy.T @ x",
                    "        else:\n            waiting.append((flow, dy, x))\n"
                    "            flow, dy, x = waiting.pop(0)\n            grads[flow] += dy.T @ x",
                )
            ],
            "its own",
        ),
    },
    "dualpipe-5": {
        "not summed, once": Bad([("comm.all_reduce(w.grad, group=pair)", "pass")], "that of direction 0 alone"),
        "every parameter twice": Bad(
            [("stages[rank].parameters()", "[w for s in stages.values() for w in s.parameters()]")],
            "every parameter is counted twice",
        ),
        "of this rank alone": Bad([("    comm.all_reduce(squares)\n", "")], "that of this rank's stages alone"),
        "sum of norms": Bad(
            [
                (
                    "    comm.all_reduce(squares)\n",
                    "    squares = squares.sqrt()\n    comm.all_reduce(squares)\n    squares **= 2\n",
                )
            ],
            "norms do not",
        ),
        "mean": Bad([("group=pair)\n", "group=pair)\n            w.grad /= 2\n")], "are added"),
        "steps before the sum": Bad(
            [
                (
                    "            comm.all_reduce(w.grad, group=pair)",
                    "            comm.all_reduce(total := w.grad.clone(), group=pair)\n            w.total = total",
                ),
                ("w.grad.square()", "w.total.square()"),
            ],
            "by the gradient of direction",
        ),
        "always scaled": Bad([("min(1.0, max_norm / norm)", "max_norm / norm")], "max_norm 10"),
        "not clipped": Bad([(" * min(1.0, max_norm / norm)", "")], "the whole gradient, unclipped"),
        "up": Bad([("w.data -=", "w.data +=")], "a step goes down"),
    },
}

CHEATS = {
    "dualpipe-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")},
    "dualpipe-2": {
        "the library's own": Bad(
            "def one_row(rank, p, m, cut, room):\n"
            "    return (lab.schedules.dualpipev if cut else lab.schedules.dualpipe)(p, m).rows()[rank]",
            "switched off",
        ),
        "the library's words": Bad(
            """
from dualpipe_lab.pp.schedules.dualpipe import Flow, steps_of


def one_row(rank, p, m, cut, room):
    return " ".join(map(str, steps_of((Flow(0, 0), Flow(1, 2)), 0, 1, m // 2)))
""",
            "switched off",
        ),
        "hard-coded": Bad(
            "def one_row(rank, p, m, cut, room):\n"
            "    return ('0F0 1F2 0F1 1B2 (1F3;0B0)OVERLAP_F_B 1B3 0I1 0W1',"
            " '0F2 1F0 0F3 1B0 (1F1;0B2)OVERLAP_F_B 1B1 0I3 0W3')[rank]",
            "DualPipeV, 1 rank",
        ),
        "empty": Bad(
            "def one_row(rank, p, m, cut, room):\n    return ''", "rank 0, action 1, in step 2: nothing, expected 0F0"
        ),
    },
    "dualpipe-3": {
        "empty": Bad("upper = []", "0 rows"),
        "no work": Bad('upper = ["0F0", "1F0"]', "the validator says"),
        "a number": Bad("upper = 19", "two lines of text"),
    },
    "dualpipe-4": {
        "nothing": Bad(QUEUE + "    return []", "after B0: it returned 0 gradients"),
        "all at once": Bad(
            QUEUE
            + "    for flow in (0, 1):\n        for dy, x in zip(dys[flow], inputs[flow]):\n"
            + "            grads[flow] += dy.T @ x\n"
            + "    return [dys[0][0] @ weights[0]]",
            "after B0",
        ),
    },
    "dualpipe-5": {
        "nothing": Bad("def clipped_step(*args):\n    pass", "returned the norm nan"),
        "a norm without a step": Bad(
            [("w.data -= lr", "w.data -= 0 * lr")],
            "have not moved",
        ),
        "gathers everything": Bad(
            [
                (
                    "comm.all_reduce(w.grad, group=pair)",
                    "comm.all_reduce(w.grad, group=pair)\n            comm.all_gather_object(w.grad)",
                )
            ],
            "bytes",
        ),
    },
}
