"""Typical wrong answers and lazy cheats of the exercises on time."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "time-1": {
        "no queue": Bad("makespan_ms = 27", "the link is occupied"),
        "no latency": Bad("makespan_ms = 26", "counts no latency"),
        "latency blocks": Bad("makespan_ms = 32", "latency does not occupy the link"),
    },
    "time-3": {
        "longest work first": Bad("order = [3, 1, 0, 4, 2]", "legal: "),
        "one twice": Bad("order = [4, 3, 1, 0, 0]", "each of the messages"),
        "too few": Bad("order = [4, 3, 1]", "got 3"),
    },
}

CHEATS = {
    "time-1": {"equal to everything": Bad(EQUAL_TO_ALL + "makespan_ms = Anything()", "whole number")},
    "time-3": {"nothing to do": Bad("order = [0, 1, 2, 3, 4]", "takes 42")},
}
