"""Typical wrong answers and lazy cheats of the exercises on PipeDream."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "used, newest_at_b, kept, used_synced, kept_synced, peak"
ROWS = "def rows(num_ranks, num_microbatches, num_steps, flush):\n"

TYPICAL = {
    "pipedream-1": {
        "no delay": Bad(f"{NAMES} = 9, 9, 3, 6, 4, 2", "without a delay"),
        "stage 0's": Bad(f"{NAMES} = 6, 9, 3, 6, 4, 2", "one stage nearer to the loss"),
        "sync changes nothing": Bad(f"{NAMES} = 7, 9, 3, 7, 3, 2", "stage 0's version goes along"),
    },
    "pipedream-2": {
        "one forward too many": Bad([("num_ranks - 1 - rank,", "num_ranks - rank,")], "action 2: 0F1, expected 0B0"),
        "always flushes": Bad([("if not flush:", "if False:")], "without flush: rank 0"),
        "never flushes": Bad([("if not flush:", "if True:")], "with flush: rank 0"),
    },
    "pipedream-3": {
        "sends after the next forward": Bad(
            [
                ("            words += gradient\n", ""),
                ("            gradient = [", "            words += gradient\n            gradient = ["),
            ],
            "2 rank(s), 3 microbatch(es): it ends, after 13 ticks instead of 12",
        ),
        "ranks of one digit": Bad(
            [
                (
                    "kind, i = word.removeprefix(str(rank))[0], word.removeprefix(str(rank))[1:]",
                    "kind, i = word[1], word[2:]",
                )
            ],
            "11 rank(s), 4 microbatch(es)",
        ),
        "receives gradients first": Bad(
            [
                (
                    '            if kind == "F" and not first:\n                words.append(f"{rank}RECV_F{i}")\n'
                    "            words += gradient\n",
                    '            words += gradient\n            if kind == "F" and not first:\n'
                    '                words.append(f"{rank}RECV_F{i}")\n',
                ),
            ],
            "2 rank(s), 2 microbatch(es), where a send waits for its receiver",
        ),
    },
}

CHEATS = {
    "pipedream-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 6", "whole number")},
    "pipedream-2": {
        "interleaved with one stage": Bad(
            ROWS + "    return list(lab.schedules.interleaved(num_ranks, num_microbatches, 1).rows())", "switched off"
        ),
    },
    "pipedream-3": {
        "the library's own": Bad(
            "def with_messages(rows):\n    return lab.lower(lab.Program.parse('mine', rows)).rows()", "switched off"
        ),
    },
}
