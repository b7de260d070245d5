"""Typical wrong answers and lazy cheats of the exercises on DualPipe."""

from bad_answer import Bad

QUEUE = "def backwards(words, weights, grads, inputs, dys):\n"

TYPICAL = {
    "dualpipe-6": {
        "m for both flows": Bad(
            [("rounds = m // 2 - p + outside", "rounds = m - p + outside")],
            "words(0, 2, 4): word 6 is F0&B1, expected B1; it has 5 pairs, expected 1",
        ),
        "newest W first": Bad([("waiting.popleft()", "waiting.pop()")], "W belongs to the oldest I that waits"),
        "flow 0 is direction 0 everywhere": Bad(
            [("(down, up) if position < p // 2 else (up, down)", "(down, up)")], "it comes from the nearer end"
        ),
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
}

CHEATS = {
    "dualpipe-6": {
        "the library's own": Bad(
            "from dualpipe_lab.pp import schedules\n\n\ndef dualpipe_rows(p, m):\n"
            "    return schedules.dualpipe(p, m).rows()\n",
            "is the library's",
        ),
    },
    "dualpipe-4": {
        "nothing": Bad(QUEUE + "    return []", "after B0: it returned 0 gradients"),
    },
}
