"""Typical wrong answers and lazy cheats of the exercises on PipeDream."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "used, newest_at_b, kept, used_synced, kept_synced, peak"
ROWS = "def rows(num_ranks, num_microbatches, num_steps, flush):\n"

TYPICAL = {
    "pipedream-1": {
        "no delay": Bad(f"{NAMES} = 9, 9, 3, 6, 4, 2", "without a delay"),
        "stage 0's": Bad(f"{NAMES} = 6, 9, 3, 6, 4, 2", "one stage nearer to the loss"),
        "no update in between": Bad(f"{NAMES} = 7, 7, 3, 6, 4, 2", "one with each B in between"),
        "two versions": Bad(f"{NAMES} = 7, 9, 2, 6, 4, 2", "7, 8 and 9"),
        "sync changes nothing": Bad(f"{NAMES} = 7, 9, 3, 7, 3, 2", "stage 0's version goes along"),
        "sync keeps as many": Bad(f"{NAMES} = 7, 9, 3, 6, 3, 2", "kept for one update more"),
        "many microbatches": Bad(f"{NAMES} = 7, 9, 3, 6, 4, 3", "a batch has only 2"),
    },
    "pipedream-2": {
        "GPipe": Bad(
            [("min(num_ranks - 1 - rank, len(batch))", "len(batch)")],
            "1 rank(s), 1 microbatch(es), 2 step(s), without flush: rank 0, action 2: 0F1, expected 0B0",
        ),
        "one forward too many": Bad([("num_ranks - 1 - rank,", "num_ranks - rank,")], "action 2: 0F1, expected 0B0"),
        "one forward too few": Bad(
            [("min(num_ranks - 1 - rank, len(batch))", "min(max(0, num_ranks - 2 - rank), len(batch))")],
            "2 rank(s), 1 microbatch(es), 2 step(s), without flush",
        ),
        "no limit": Bad(
            [("min(num_ranks - 1 - rank, len(batch))", "num_ranks - 1 - rank")], "action 3: 0B1, expected 0B0"
        ),
        "always flushes": Bad([("if not flush:", "if False:")], "without flush: rank 0"),
        "never flushes": Bad([("if not flush:", "if True:")], "with flush: rank 0"),
        "starts from 0 again": Bad(
            [("range(k * num_microbatches, (k + 1) * num_microbatches)", "range(num_microbatches)")],
            "action 3: 0F0, expected 0F1",
        ),
        "the same warm-up everywhere": Bad([("num_ranks - 1 - rank,", "num_ranks - 1,")], "expected 1B0"),
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
        "another order of work": Bad(
            [
                (
                    "for word in row.split():",
                    "for word in sorted(row.split(), key=lambda w: 'B' in w):",
                ),
            ],
            "leave it at 0F0 0B0 0F1 0B1",
        ),
    },
}

CHEATS = {
    "pipedream-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 6", "whole number")},
    "pipedream-2": {
        "the library's own": Bad(
            ROWS
            + "    program = lab.schedules.pipedream(num_ranks, num_microbatches * num_steps)\n"
            + "    return list(program.rows())",
            "switched off",
        ),
        "the library's part": Bad(
            """
from dualpipe_lab.pp.schedules.looped import warmup_steady_cooldown


def rows(p, m, steps, flush):
    cells = [[(r, i) for i in range(m * steps)] for r in range(p)]
    return [" ".join(map(str, warmup_steady_cooldown(cells[r], cells[r], p - 1 - r))) for r in range(p)]
""",
            "switched off",
        ),
        "interleaved with one stage": Bad(
            ROWS + "    return list(lab.schedules.interleaved(num_ranks, num_microbatches, 1).rows())", "switched off"
        ),
        "hard-coded": Bad(ROWS + "    return ['0F0 0B0']", "1 rank(s), 1 microbatch(es), 2 step(s)"),
        "empty": Bad(ROWS + "    return [''] * num_ranks", "nothing, expected 0F0"),
    },
    "pipedream-3": {
        "nothing": Bad("def with_messages(rows):\n    return rows", "0 sends and receives, expected 4"),
        "the library's own": Bad(
            "def with_messages(rows):\n    return lab.lower(lab.Program.parse('mine', rows)).rows()", "switched off"
        ),
        "hard-coded": Bad("def with_messages(rows):\n    return ['0F0 0B0']", "the validator says"),
    },
}
