"""Typical wrong answers and lazy cheats of the exercises on a run on many hosts."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "rank, offset, bound, apart, seconds = "
_BEST = "min(answers, key=lambda answer: answer[2] - answer[0])"
_LINE = "    offset += (other_offset - offset) * (time - begin) / (end - begin)\n"

TYPICAL = {
    "many_hosts-1": {
        "host by host from one": Bad(_PREDICT + "11, 4050, 150, 240, 50", "three whole hosts come before"),
        "at the beginning": Bad(_PREDICT + "14, 4200, 150, 240, 50", "half way is the best guess"),
        "the whole travel": Bad(_PREDICT + "14, 4050, 300, 240, 50", "at most half of it"),
        "the larger bound": Bad(_PREDICT + "14, 4050, 150, 150, 50", "has an error too"),
        "20 us are enough": Bad(_PREDICT + "14, 4050, 150, 240, 20", "in each second"),
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
        "the time of asking": Bad([("s - (t0 + t1) / 2", "s - t0")], "take the middle"),
        "the other sign": Bad([("s - (t0 + t1) / 2", "(t0 + t1) / 2 - s")], "the opposite sign"),
        "half of the bound": Bad([("(t1 - t0) / 2", "(t1 - t0) / 4")], "may take unequal times"),
        "all of the travel": Bad([("2, (t1 - t0) / 2", "2, t1 - t0")], "expected at most 400.0"),
        "no drift": Bad([(_LINE, "")], "this is the first offset alone"),
        "half way between the readings": Bad(
            [(_LINE, "    offset = (offset + other_offset) / 2\n")], "this is the mean of both offsets"
        ),
        "the offset": Bad([("return time + offset", "return offset")], "this is the offset, not the time"),
        "taken away": Bad([("return time + offset", "return time - offset")], "add it"),
        "the smaller bound": Bad([("max(bound", "min(bound")], "wrong by the larger bound"),
        "both bounds": Bad([("max(bound, other_bound)", "bound + other_bound")], "the larger of both bounds"),
    },
    "many_hosts-3": {
        "by receiver": Bad(
            [("setdefault(sender", "setdefault(receiver")], "the stored run: got host 0, expected host 1"
        ),
        "without bytes": Bad([(" / m.num_bytes)", ")")], "messages of two sizes: got host 1, expected None"),
        "short ones too": Bad([(" and m.num_bytes >= 65_536", "")], "many short messages"),
        "inside too": Bad([("sender != receiver and ", "")], "most messages stay inside their host: got None"),
        "the mean": Bad(
            [("sorted(times)[len(times) // 2]", "sum(times) / len(times)")], "one receiver in five is late"
        ),
        "the slowest message": Bad([("sorted(times)[len(times) // 2]", "max(times)")], "got"),
        "always one": Bad([(" if per_byte[slowest] > 4 * per_byte[second] else None", "")], "expected None"),
        "a rank": Bad([("m.src // ranks_per_host", "m.src")], "got None, expected host 1"),
        "against the mean of all": Bad(
            [
                (
                    "per_byte[slowest] > 4 * per_byte[second]",
                    "per_byte[slowest] > 4 * sum(per_byte.values()) / len(per_byte)",
                )
            ],
            "got None, expected host",
        ),
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
        "a wide bound": Bad(
            "def read_clock(answers):\n    return 0, 10**16\n\n"
            "def on_their_clock(time, first, second):\n    return time, 10**16",
            "expected at most",
        ),
        "equal to everything": Bad(
            EQUAL_TO_ALL + "def read_clock(answers):\n    return Anything(), Anything()\n\non_their_clock = read_clock",
            "which is no data",
        ),
    },
    "many_hosts-3": {
        "none is slow": Bad("def slow_host(timeline, ranks_per_host):\n    return None", "expected host 1"),
        "the last host": Bad(
            "def slow_host(timeline, ranks_per_host):\n    return timeline.num_ranks // ranks_per_host - 1",
            "expected host 0",
        ),
        "equal to everything": Bad(
            EQUAL_TO_ALL + "def slow_host(timeline, ranks_per_host):\n    return Anything()", "which is no data"
        ),
    },
}
