"""Typical wrong answers and lazy cheats of the exercises on a run on many hosts."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "rank, offset, bound, apart, seconds = "
_BEST = "min(answers, key=lambda answer: answer[2] - answer[0])"

TYPICAL = {
    "many_hosts-1": {
        "host by host from one": Bad(_PREDICT + "11, 4050, 150, 240, 50", "three whole hosts come before"),
        "at the beginning": Bad(_PREDICT + "14, 4200, 150, 240, 50", "half way is the best guess"),
        "the whole travel": Bad(_PREDICT + "14, 4050, 300, 240, 50", "at most half of it"),
    },
    "many_hosts-2": {
        "mean of all answers": Bad(
            [
                (
                    f"t0, s, t1 = {_BEST}\n    return s - (t0 + t1) / 2, (t1 - t0) / 2",
                    "t0, s, t1 = (sum(x) / len(answers) for x in zip(*answers))\n"
                    "    return s - (t0 + t1) / 2, min(a[2] - a[0] for a in answers) / 2",
                )
            ],
            "this is the mean of all answers",
        ),
        "the slowest answer": Bad([(_BEST, _BEST.replace("min", "max"))], "this is the slowest answer"),
        "the last answer": Bad([(_BEST, "answers[-1]")], "the quickest one has the smallest bound"),
    },
    "many_hosts-3": {
        "by receiver": Bad(
            [("setdefault(sender", "setdefault(receiver")], "the stored run: got host 0, expected host 1"
        ),
        "without bytes": Bad([(" / m.num_bytes)", ")")], "messages of two sizes: got host 1, expected None"),
        "short ones too": Bad([(" and m.num_bytes >= 65_536", "")], "many short messages"),
    },
}

CHEATS = {
    "many_hosts-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "rank = offset = bound = apart = seconds = Anything()", "must be a whole number"
        ),
    },
    "many_hosts-2": {
        "an infinite bound": Bad(
            "def read_clock(answers):\n    return 0, float('inf')\n\n"
            "def on_their_clock(time, first, second):\n    return time, float('inf')",
            "finite",
        ),
    },
    "many_hosts-3": {
        "none is slow": Bad("def slow_host(timeline, ranks_per_host):\n    return None", "expected host 1"),
    },
}
