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
    },
    "one_f_one_b-2": {
        "each by its own room": Bad([("min(room[: rank + 1])", "room[rank]")], "[1, 4, 4]: the validator says"),
        "tokens alone": Bad([("i - oldest == num_ranks - rank or ", "")], "microbatches, 1F1B holds"),
        "microbatches alone": Bad([(" or held + size > limit", "")], "tokens, it has room for"),
    },
    "one_f_one_b-3": {
        "twice the warm-up": Bad([("[4, 3, 2, 0]", "[6, 4, 2, 0]")], "add up to 16"),
        "a later rank has more": Bad([("[4, 3, 2, 0]", "[2, 3, 2, 0]")], "the validator says"),
    },
    "one_f_one_b-4": {
        "by places of the world": Bad([("last_place - place\n", "world_size - 1 - place\n")], "holds 2"),
        "one too few": Bad([("last_place - place\n", "max(0, last_place - place - 1)\n")], "1F1B's takes 18"),
        "one too many": Bad([("len(live) > warmup", "len(live) > warmup + 1")], "holds 4 microbatches, 1F1B holds 3"),
    },
}

CHEATS = {
    "one_f_one_b-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 6", "whole number")},
    "one_f_one_b-2": {
        "plain 1F1B": Bad(
            ROWS + "    return list(lab.schedules.one_f_one_b(len(room), len(sizes)).rows())", "switched off"
        ),
    },
    "one_f_one_b-3": {
        "the library's": Bad("order = lab.schedules.one_f_one_b(4, 10).rows()", "52 are allowed"),
    },
    "one_f_one_b-4": {
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
