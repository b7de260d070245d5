"""Typical wrong answers and lazy cheats of the exercises on interleaved 1F1B."""

from bad_answer import EQUAL_TO_ALL, Bad

_LIBRARY = "import dualpipe_lab as lab\nfrom dualpipe_lab import schedules\n"

TYPICAL = {
    "interleaved-1": {
        "1F1B": Bad([("234", "270")], "this is 1F1B"),
        "divided twice": Bad([("234", "222")], "divided by v twice"),
        "small stages": Bad([(" 5,", " 15,")], "a rank's whole share"),
        "without the loop": Bad([("264", "72")], "without the loop"),
        "one direction": Bad([("264", "132")], "gradients travel too"),
        "published": Bad([(", 78", ", 54")], "cannot keep 4 ranks busy"),
    },
    "interleaved-2": {
        "rounds of p and a rest": Bad(
            [
                ("max(1, m // p)", "-(-m // p)"),
                ("m // num_rounds + (index < m % num_rounds)", "min(p, m - start)"),
            ],
            "2 rank(s), 3 microbatch(es), 2 stage(s) per rank: 23 ticks",
        ),
        "larger rounds last": Bad(
            [("index < m % num_rounds", "index >= num_rounds - m % num_rounds")], "the validator says"
        ),
        "the rest in the first round": Bad(
            [("m // num_rounds + (index < m % num_rounds)", "min(p, m) + (index == 0) * max(0, m - num_rounds * p)")],
            "as equal as can be",
        ),
        "warm-up of 1F1B": Bad([("2 * (p - 1 - rank)", "(p - 1 - rank)")], "to leave messages time"),
        "warm-up for rounds of p": Bad([("(v - 1) * len(rounds[0])", "(v - 1) * p")], "the validator says"),
        "no warm-up": Bad([("2 * (p - 1 - rank)", "0")], "its warm-up is too short"),
        "breadth first": Bad([("(v - 1) * len(rounds[0]) + 2 * (p - 1 - rank)", "m * v")], "are enough"),
        "neighbours on a rank": Bad([("range(rank, v * p, p)", "range(v * rank, v * rank + v)")], "stage s is on rank"),
        "split backwards": Bad([('"{s}B{i}"', '"{s}I{i} {s}W{i}"')], "made of F and B"),
    },
    "interleaved-3": {
        "as small as can be": Bad([("6, 8", "12, 4")], "are possible"),
        "rounds of p": Bad([("6, 8", "3, 4")], "1888 ticks; 1788 are possible"),
        "too much room": Bad([("6, 8", "6, 9")], "there is room for 8"),
        "8 of 12": Bad([("6, 8", "8, 7")], "cannot share"),
        "rounds too small": Bad([("6, 8", "6, 3")], "as many as ranks"),
    },
    "interleaved-4": {
        "one too many": Bad([("num_ranks - 1 - rank", "num_ranks - rank")], "1F1B holds 1"),
        "half, rounded": Bad([("num_ranks - 1 - rank", "(num_ranks - 1 - rank) // 2")], "the warm-up is too short"),
        "GPipe": Bad([("num_ranks - 1 - rank", "num_microbatches")], "as well"),
        "as it was": Bad(
            [("num_ranks - 1 - rank", "2 * (num_ranks - 1 - rank)")],
            "2 rank(s), 3 microbatch(es): rank 0 holds 3 activations, 1F1B holds 2",
        ),
    },
}

CHEATS = {
    "interleaved-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "makespan = peak = messages = makespan_of_two = Anything()", "whole number"
        )
    },
    "interleaved-2": {
        "the library's own": Bad(
            _LIBRARY + "def loop_rows(p, m, v):\n    return schedules.interleaved(p, m, v).rows()", "switched off"
        ),
        "its parts": Bad(
            _LIBRARY
            + """
from dualpipe_lab.pp.schedules.looped import loop_cells, round_sizes
def loop_rows(p, m, v):
    return [loop_cells(r, p, round_sizes(p, m), v) for r in range(p)]
""",
            "switched off",
        ),
        "the example": Bad(
            """
def loop_rows(p, m, v):
    return ["0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2", "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2"]
""",
            "2 rows for 1 ranks",
        ),
    },
    "interleaved-3": {
        "equal to everything": Bad(EQUAL_TO_ALL + "stages_per_rank = round_size = Anything()", "whole number"),
        "nothing": Bad("stages_per_rank = round_size = 0", "0 stages per rank"),
    },
    "interleaved-4": {
        "the library's own": Bad(
            _LIBRARY + "def one_f_one_b_rows(p, m):\n    return schedules.build('1F1B', p, m).rows()", "switched off"
        ),
        "one row": Bad("def one_f_one_b_rows(p, m):\n    return ['0F0 0B0']", "1 rank(s), 2 microbatch(es)"),
    },
}
