"""Typical wrong answers and lazy cheats of the exercises on 1F1B."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "before_b, after_b4, tick, finished, held, held_of_three"
ROWS = "def rows(sizes, room):\n"
STEP = "def pipeline_step(rank, world_size, pipeline, stage, inputs, targets, num_microbatches, like):\n"

TYPICAL = {
    "one_f_one_b-1": {
        "the warm-up alone": Bad(f"{NAMES} = 3, 8, 22, 2, 15, 12", "begins with one more forward"),
        "one behind": Bad(f"{NAMES} = 4, 7, 22, 2, 15, 12", "that of microbatch 4"),
        "its own forwards": Bad(f"{NAMES} = 4, 8, 10, 2, 15, 12", "the gradient is not there yet"),
        "the one under way": Bad(f"{NAMES} = 4, 8, 22, 3, 15, 12", "the third is in its B"),
        "GPipe": Bad(f"{NAMES} = 4, 8, 22, 2, 60, 12", "GPipe's"),
        "as with a large batch": Bad(f"{NAMES} = 4, 8, 22, 2, 15, 15", "the 3 microbatches that there are"),
    },
    "one_f_one_b-2": {
        "each by its own room": Bad([("min(room[: rank + 1])", "room[rank]")], "[1, 4, 4]: the validator says"),
        "the least room of all": Bad([("min(room[: rank + 1])", "min(room)")], "by the rule they end at"),
        "tokens alone": Bad([("i - oldest == num_ranks - rank or ", "")], "microbatches, 1F1B holds"),
        "microbatches alone": Bad([(" or held + size > limit", "")], "tokens, it has room for"),
        "one too many": Bad([("i - oldest == num_ranks - rank", "i - oldest > num_ranks - rank")], "1F1B holds"),
        "one B before each F": Bad([("            while i - oldest", "            if i - oldest")], "it has room for"),
        "drains": Bad(
            [
                (
                    "            while i - oldest == num_ranks - rank or held + size > limit:\n",
                    "            full = i - oldest == num_ranks - rank or held + size > limit\n"
                    "            while full and oldest < i:\n",
                )
            ],
            "by the rule they end at",
        ),
    },
    "one_f_one_b-3": {
        "twice the warm-up": Bad([("[4, 3, 2, 0]", "[6, 4, 2, 0]")], "add up to 16"),
        "one more everywhere": Bad([("[4, 3, 2, 0]", "[4, 3, 2, 1]")], "add up to 14"),
        "rank 0 alone": Bad([("[4, 3, 2, 0]", "[4, 2, 1, 0]")], "52 are allowed"),
        "deepest first": Bad([("[4, 3, 2, 0]", "[6, 2, 1, 0]")], "52 are allowed"),
        "a later rank has more": Bad([("[4, 3, 2, 0]", "[2, 3, 2, 0]")], "the validator says"),
    },
    "one_f_one_b-4": {
        "by places of the world": Bad([("last_place - place\n", "world_size - 1 - place\n")], "holds 2"),
        "one too few": Bad([("last_place - place\n", "max(0, last_place - place - 1)\n")], "1F1B's takes 18"),
        "one too many": Bad([("len(live) > warmup", "len(live) > warmup + 1")], "holds 4 microbatches, 1F1B holds 3"),
        "all forwards first": Bad([("len(live) > warmup", "len(live) > num_microbatches")], "1F1B holds 3"),
        "the newest first": Bad([("live.pop(0)", "live.pop()")], "gradients"),
    },
}

CHEATS = {
    "one_f_one_b-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 6", "whole number")},
    "one_f_one_b-2": {
        "plain 1F1B": Bad(
            ROWS + "    return list(lab.schedules.one_f_one_b(len(room), len(sizes)).rows())", "switched off"
        ),
        "hard-coded": Bad(ROWS + "    return ['0F0 0B0']", "tokens [2, 1], room [3]"),
        "one after the other": Bad(
            ROWS + "    return [' '.join(f'{r}F{i} {r}B{i}' for i in range(len(sizes))) for r in range(len(room))]",
            "by the rule they end at",
        ),
        "empty": Bad(ROWS + "    return [''] * len(room)", "0 rows for 1 ranks"),
    },
    "one_f_one_b-3": {
        "the library's": Bad("order = lab.schedules.one_f_one_b(4, 10).rows()", "52 are allowed"),
        "fewer microbatches": Bad("order = lab.schedules.gpipe(4, 3).rows()", "the validator says"),
    },
    "one_f_one_b-4": {
        "nothing": Bad(STEP + "    pass", "gradients are all zero"),
        "the library's runtime": Bad(
            STEP
            + "    program = lab.schedules.one_f_one_b(len(pipeline), num_microbatches)\n"
            + "    place = pipeline.index(rank)\n"
            + "    group = [comm.new_group(p) for p in ([0, 1], [2, 3])][rank // 2] if world_size == 4 else None\n"
            + "    lab.PipelineRuntime(program, {place: stage}, mse_loss, like, group=group).step(inputs, targets)",
            "switched off",
        ),
    },
}
