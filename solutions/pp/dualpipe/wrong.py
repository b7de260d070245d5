"""Typical wrong answers and lazy cheats of the exercises on DualPipe."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "bubble_of_rank_2, bubble_of_rank_0, published, peak"
QUEUE = "def backwards(words, weights, grads, inputs, dys):\n"

TYPICAL = {
    "dualpipe-1": {
        "published everywhere": Bad(f"{NAMES} = 22, 22, 22, 7", "for t_F = t_I >= t_W only"),
        "three terms": Bad(f"{NAMES} = 16, 14, 22, 7", "one more term"),
        "pairs gain nothing": Bad(f"{NAMES} = 20, 20, 22, 7", "two less than F and B"),
    },
    "dualpipe-2": {
        "no step 3": Bad(
            [("    for _ in range(inside):  # step 3\n", "    for _ in range(0):  # step 3\n")],
            "DualPipe, 4 ranks, 8 microbatches: rank 0, action 5, in step 3",
        ),
        "the page's rows": Bad(
            [("waiting = min(room, outside)", "room = waiting = outside")],
            "DualPipe, 2 ranks, 4 microbatches, room for 0 waiting: rank 0, action 7, in step 6",
        ),
        "DualPipeV on p stages": Bad(
            [("(2 * num_ranks - 1 - rank, 0)", "(num_ranks - 1 - rank, 0)")],
            "DualPipeV, 1 rank, 2 microbatches: rank 0",
        ),
    },
    "dualpipe-3": {
        "a microbatch too few": Bad([(" 0I2 0W2", "")], "the validator says"),
        "whole backwards": Bad(
            [("3I3 3W3", "3B3"), ("3I5 3W5", "3B5"), ("0I2 0W2", "0B2"), ("0I1 0W1", "0B1")], "valid, 21"
        ),
        "weights first": Bad([("2I3 1I0 2W3", "2I3 2W3 1I0")], "ticks with 4 activations"),
    },
    "dualpipe-4": {
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
    },
    "dualpipe-5": {
        "not summed, once": Bad([("comm.all_reduce(w.grad, group=pair)", "pass")], "that of direction 0 alone"),
        "every parameter twice": Bad(
            [("stages[rank].parameters()", "[w for s in stages.values() for w in s.parameters()]")],
            "every parameter is counted twice",
        ),
        "of this rank alone": Bad([("    comm.all_reduce(squares)\n", "")], "that of this rank's stages alone"),
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
    },
    "dualpipe-3": {
        "empty": Bad("upper = []", "0 rows"),
    },
    "dualpipe-4": {
        "nothing": Bad(QUEUE + "    return []", "after B0: it returned 0 gradients"),
    },
    "dualpipe-5": {
        "nothing": Bad("def clipped_step(*args):\n    pass", "returned the norm nan"),
    },
}
