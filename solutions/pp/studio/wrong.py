"""Typical wrong answers and lazy cheats of the exercises on the schedule studio."""

from bad_answer import Bad

LIBRARY = "from dualpipe_lab import pp\nrows = pp.schedules.{}.rows()"

TYPICAL = {
    "studio-1": {
        "as it was": Bad('rows = ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]', "deadlock"),
        "the wrong one moved": Bad('rows = ["0F0 0B1 0F1 0B0", "1F0 1F1 1B0 1B1"]', "validator says"),
    },
    "studio-2": {
        "the second 1F1 is left out": Bad(
            'rows = ["0F0 0F1 0B0 0F2 1B1 0B2", "1F0 1B0 1F1 1F2 1B2"]', "the validator says"
        ),
        "a microbatch less": Bad('rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]', "no rank runs 2"),
    },
    "studio-3": {
        "GPipe": Bad(LIBRARY.format("gpipe(3, 4)"), "a rank holds 4 activations, 3 are allowed"),
        "one after the other": Bad(
            'rows = ["0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3", '
            '"2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"]',
            "it takes 36 ticks, at most 18 are allowed",
        ),
    },
    "studio-4": {
        "GPipe": Bad(LIBRARY.format("gpipe(4, 6)"), "a rank holds 6 activations, 5 are allowed"),
        "two at a time": Bad(
            'rows = [" ".join(f"{s}F{m} {s}F{m + 1} {s}B{m} {s}B{m + 1}" for m in (0, 2, 4)) for s in range(4)]',
            "at most 27 are allowed",
        ),
    },
    "studio-5": {
        "1F1B": Bad(LIBRARY.format("one_f_one_b(3, 6)"), "a rank holds 3 activations, 2 are allowed"),
        "two at a time": Bad(
            'rows = [" ".join(f"{s}F{m} {s}F{m + 1} {s}B{m} {s}B{m + 1}" for m in (0, 2, 4)) for s in range(3)]',
            "at most 27 are allowed",
        ),
    },
    "studio-6": {
        "1F1B": Bad(LIBRARY.format("one_f_one_b(4, 6)"), "it takes 27 ticks, at most 24 are allowed"),
        "ZB-H2": Bad(LIBRARY.format("zero_bubble_h2(4, 6)"), "a rank holds 6 activations, 4 are allowed"),
    },
    "studio-7": {
        "1F1B": Bad(LIBRARY.format("one_f_one_b(2, 4)"), "it takes 15 ticks, at most 14 are allowed"),
        "another number of stages": Bad(LIBRARY.format("zbv(2, 4)"), "validator says"),
    },
    "studio-8": {
        "breadth first": Bad(LIBRARY.format("looped_bfs(2, 4)"), "a rank holds 8 activations, 5 are allowed"),
        "two copies": Bad(
            'rows = ["0F0 1F0 2F1 3F1 3B1 2B1 1B0 0B0 0F2 1F2 2F3 3F3 3B3 2B3 1B2 0B2", '
            '"0F1 1F1 2F0 3F0 3B0 2B0 1B1 0B1 0F3 1F3 2F2 3F2 3B2 2B2 1B3 0B3"]',
            "one copy of every stage is allowed",
        ),
    },
    "studio-9": {
        "1F1B": Bad(LIBRARY.format("one_f_one_b(3, 5)"), "it takes 37 ticks, at most 30 are allowed"),
        "ZB-H1": Bad(LIBRARY.format("zero_bubble_h1(3, 5)"), "it takes 33 ticks, at most 30 are allowed"),
    },
    "studio-10": {
        "DualPipeV": Bad(LIBRARY.format("dualpipev(4, 8)"), "it takes 54 ticks, at most 51 are allowed"),
        "DualPipe itself": Bad(LIBRARY.format("dualpipe(4, 8)"), "validator says"),
    },
}

CHEATS = {
    f"studio-{number}": {
        "empty": Bad("rows = []", "0 rows"),
        "no backwards": Bad(
            f'rows = [" ".join(f"{{s}}F{{m}}" for m in range({microbatches})) for s in range({ranks})]',
            "the validator says",
        ),
    }
    for number, (ranks, microbatches) in enumerate(
        [(2, 2), (2, 3), (3, 4), (4, 6), (3, 6), (4, 6), (2, 4), (2, 4), (3, 5), (4, 8)], 1
    )
}
