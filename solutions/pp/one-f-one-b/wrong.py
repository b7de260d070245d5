"""Typical wrong answers and lazy cheats of the exercises on 1F1B."""

from bad_answer import Bad

STEP = "def pipeline_step(rank, world_size, pipeline, stage, inputs, targets, num_microbatches, like):\n"

TYPICAL = {
    "one_f_one_b-5": {
        "one forward too few": Bad(
            [("min(p - 1 - stage, m)", "min(max(p - 2 - stage, 0), m)")], "yours takes 18 ticks and holds [1, 1]"
        ),
        "one forward too many": Bad(
            [("min(p - 1 - stage, m)", "min(p - stage, m)")],
            "the warm-up is one forward for each stage behind this one",
        ),
        "more forwards than microbatches": Bad([("min(p - 1 - stage, m)", "p - 1 - stage")], "is in row 0"),
    },
    "one_f_one_b-4": {
        "by places of the world": Bad([("last_place - place\n", "world_size - 1 - place\n")], "holds 2"),
        "one too few": Bad([("last_place - place\n", "max(0, last_place - place - 1)\n")], "1F1B's takes 18"),
        "one too many": Bad([("len(live) > warmup", "len(live) > warmup + 1")], "holds 4 microbatches, 1F1B holds 3"),
    },
}

CHEATS = {
    "one_f_one_b-5": {
        "the library's": Bad(
            "from dualpipe_lab.pp import schedules\n\n\n"
            "def one_f_one_b_rows(p, m):\n    return list(schedules.one_f_one_b(p, m).rows())",
            "is the library's",
        ),
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
