"""The project "Assemble a trainer from the parts": six milestones, each judged on its own.

Chapter: book/whole/project.  Runs on ranks are in `project_runs`, answers without a rank in `project_answers`.
"""

import tempfile
from collections.abc import Callable
from math import isclose
from typing import Any

from dualpipe_course.comparison import Limit, Off, check_limit, compare_on_ranks, in_words, on_one_process
from dualpipe_course.declared import Implement, Puzzle
from dualpipe_course.pp import programs
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import call_each, needs_function, on_ranks, partial_score
from dualpipe_course.whole import project_answers
from dualpipe_course.whole.project_parts import COST, LIVE, MICROBATCHES, PLACED, RANKS, TICKS
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.simulator import simulate

PLACES = tuple({"pp": pp, "dp": dp, "tp": tp} for pp, dp, tp in ((2, 2, 2), (1, 2, 2), (4, 1, 2), (3, 2, 1)))
EASY = 90  # ticks of 1F1B
SIZES = (1, 2, 4, 8)  # data ranks of the sampler
SECONDS = 40.0  # of a launch with 8 ranks
WRITTEN = (
    "dualpipe_lab.dp.ddp:DDP",
    "dualpipe_lab.dp.zero1:Zero1",
    "dualpipe_lab.dp.zero2:Zero2",
    "dualpipe_lab.dp.zero3:Zero3",
    "dualpipe_lab.dp.sharded:ShardUpdater",
    "dualpipe_lab.dp.param_specs:ModelSpec",
    "dualpipe_lab.dp.grad_norm:global_norm",
    "dualpipe_lab.dp.checkpoint.session:save",
    "dualpipe_lab.dp.checkpoint.session:load",
    "dualpipe_lab.train.trainer:Trainer",
    "dualpipe_lab.train.run:run",
    "dualpipe_lab.train.sampler:Sampler",
)
LOST_MOMENTS = "the first loss was right, so the weights were loaded, and Adam's moments or their step count were not"


def _gradient_in_words(off: Off) -> str:
    if off.found is None and off.name != "the norm":
        return f"{off.name} is without a gradient"
    if off.name == "the norm":
        if off.slip:
            return f"the norm is that {off.slip}"
        return f"the gradients are right, and the norm is not: {in_words(off)}"
    if off.slip:
        return f"the gradient of {off.name} is {off.slip}"
    if off.name.startswith("below the bound"):
        return f"{off.name}: the clip changed gradients whose norm is within the bound; a factor is at most 1"
    if off.name.startswith("clipped"):
        return f"after the clip, {in_words(off)}; the factor is max_norm / (norm + 1e-6)"
    return f"the gradient of {in_words(off)}"


def optimizer_budget(num_ranks: int) -> dict[str, int]:
    """Bytes of state, and bytes sent in a step: three shards, and two shards to each other rank; 1 KiB for rounding."""
    from dualpipe_course.whole import project_runs

    shard = -(-project_runs.NUMBERS // num_ranks) * project_answers.BYTES
    return {"held": 3 * shard + 1024, "sent": 2 * (num_ranks - 1) * shard + 1024}


def _weights_in_words(off: Off) -> str:
    return f"after three steps the weights are {off.slip}" if off.slip else in_words(off)


def _called(starts: Any, calls: list[tuple[int, int, int]]) -> dict[tuple[int, int, int], Any]:
    found = {}
    for call, (is_fine, value) in zip(calls, call_each(starts, calls), strict=True):
        if not is_fine:
            raise Wrong(f"starts{call}: your function {value}")
        found[call] = value
    return found


def _check_resumed(found: Any, losses: list[float], weights: dict[str, Any]) -> None:
    import torch

    from dualpipe_course.whole.project_runs import SAVED_AT

    for rank, (first, _, _) in enumerate(found):
        if type(first) is not int or first != SAVED_AT:
            raise Wrong(f"rank {rank}: load returned {first!r}, the checkpoint is of step {SAVED_AT}")
    for step, (ours, theirs) in enumerate(zip(found[0][1], losses[SAVED_AT:], strict=True)):
        if not isclose(ours, theirs, rel_tol=1e-10):
            raise Wrong(
                f"resumed on pp 2, step {SAVED_AT + step}: the loss is {ours:.6f}, uninterrupted it is {theirs:.6f}; "
                + (LOST_MOMENTS if step else "the weights are not those that were saved")
            )
    for rank, (_, _, held) in enumerate(found):
        for name, value in held.items():
            error = float((torch.tensor(value, dtype=torch.float64) - weights[name]).abs().max())
            if not error <= 1e-8:
                raise Wrong(
                    f"resumed on pp 2, rank {rank}: {name} is off by {error:.1e} at the end, but the losses agree; "
                    "an Adam state is missing"
                )


def _step_in_words(off: Off) -> str:
    if off.slip:
        return f"the {off.name} is {off.slip}"
    if off.name.startswith("loss"):
        return f"{in_words(off)}; the loss of the step is the sum of all ranks' summands"
    if off.name.startswith("norm"):
        return f"the losses are right, and a norm is not: {in_words(off)}; a sum runs over the wrong group"
    return f"loss and norm are right, and the weights are not: {in_words(off)}; look at the clip and at the update"


def _num_ranks(sizes: dict[str, int]) -> int:
    return sizes["pp"] * sizes["dp"] * sizes["tp"]


def _judge_place(fn: Callable[..., Any]) -> str:
    shapes = project_answers.shapes_of(PLACED)
    calls = [(rank, sizes, shapes) for sizes in PLACES for rank in range(_num_ranks(sizes))]
    results = iter(call_each(fn, calls))
    for sizes in PLACES:
        case = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        found = [next(results) for _ in range(_num_ranks(sizes))]
        for rank, (is_fine, value) in enumerate(found):
            if not is_fine:
                raise Wrong(f"{case}, rank {rank}: your function {value}")
        try:
            project_answers.check_placement([value for _, value in found], sizes, shapes)
        except Wrong as wrong:
            raise Wrong(f"{case}: {wrong.message}", score=wrong.score) from None
    return f"{len(calls)} ranks of {len(PLACES)} plans; no placement has a fullest rank with fewer bytes"


def _judge_gradients(sum_gradients: Callable[..., Any], clip: Callable[..., Any]) -> str:
    from dualpipe_course.whole import project_runs

    full = on_one_process(project_runs.first_gradients)
    answers = Without(sum_gradients, *WRITTEN), Without(clip, *WRITTEN)
    case = "pp 2 x dp 2 x tp 2"
    compare_on_ranks(project_runs.gradients, 8, *answers, full, case=case, why=_gradient_in_words, seconds=SECONDS)
    return "every class of weights has the gradient of one process within 1e-12, and one norm clips them all"


def _judge_optimizer(make: Callable[..., Any]) -> str:
    from dualpipe_course.whole import project_runs

    spent = []
    for num_ranks in (2, 3):
        shard = -(-project_runs.NUMBERS // num_ranks) * project_answers.BYTES
        limits = optimizer_budget(num_ranks)
        held = Limit(
            "held", limits["held"], "rank {rank} keeps {found:,} bytes of state between steps, the budget is {most:,}: "
            f"three numbers per weight of a shard ({shard:,} bytes each); moments of all weights are too much memory",
            scope="largest",
        )  # fmt: skip
        sent = Limit(
            "sent", limits["sent"], "rank {rank} sends {found:,} bytes in a step, the budget is {most:,}: a "
            "reduce-scatter and an all-gather; an all-reduce brings every rank gradients that it does not need",
            scope="largest",
        )  # fmt: skip
        answer = Without(make, *WRITTEN)
        found = compare_on_ranks(
            project_runs.optimizer, num_ranks, answer, case=f"{num_ranks} data ranks", why=_weights_in_words,
            limits=[held, sent],
        )  # fmt: skip
        used = [max(int(each.costs[name]) for each in found) for name in ("held", "sent")]
        spent.append(f"{used[0]:,} of {held.most:,} bytes kept, {used[1]:,} of {sent.most:,} sent on {num_ranks} ranks")
    return f"the weights of one process after three steps; {'; '.join(spent)}"


def _judge_schedule(answer: object) -> str:
    if isinstance(answer, Program):
        answer = answer.rows()
    timeline = simulate(programs.parse(answer, RANKS, MICROBATCHES), COST)
    peaks = [timeline.peak_activations(rank) for rank in range(RANKS)]
    if max(peaks) > LIVE:
        rank = peaks.index(max(peaks))
        raise Wrong(
            f"legal, {timeline.makespan} ticks, but rank {rank} holds {max(peaks)} activations; it can hold {LIVE}",
            score=0.3 if timeline.makespan <= TICKS else 0.0,
            picture=timeline,
        )
    if timeline.makespan > TICKS:
        idle = [timeline.bubble_time(rank) for rank in range(RANKS)]
        score = partial_score(timeline.makespan, EASY + 10, TICKS)
        raise Wrong(
            f"legal and within memory, but {timeline.makespan} ticks of at most {TICKS}; the ranks wait {idle} ticks",
            score=score,
            picture=timeline,
        )
    return f"{timeline.makespan} of {TICKS} ticks, {max(peaks)} of {LIVE} live activations"


def _judge_resume(starts: Callable[..., Any], save: Callable[..., Any], load: Callable[..., Any]) -> str:
    for answer in (starts, save, load):
        needs_function(answer)
    from dualpipe_course.whole import project_runs
    from dualpipe_lab.data import frozen_corpus

    starts = Without(starts, "dualpipe_lab.train.sampler:Sampler")
    save, load = Without(save, *WRITTEN), Without(load, *WRITTEN)
    num_steps = project_runs.SAVED_AT + project_runs.STEPS
    calls = [(step, rank, size) for step in range(num_steps) for size in SIZES for rank in range(size)]
    fresh = [(3, 0, 1), (5, 1, 2), (4, 0, 2), (0, 3, 4)]
    by_call, again = (_called(starts, which) for which in (calls, fresh))
    project_answers.check_starts(by_call, again, len(frozen_corpus()))

    losses, weights = on_one_process(project_runs.uninterrupted, starts)
    with tempfile.TemporaryDirectory() as folder:
        case = "saving on dp 2 x tp 2"
        before = on_ranks(project_runs.train_and_save, 4, starts, save, folder, case=case)[0]
        for step, (ours, theirs) in enumerate(zip(before, losses, strict=False)):
            if not isclose(ours, theirs, rel_tol=1e-10):
                raise Wrong(f"before the save, step {step}: the loss is {ours:.6f}, one process has {theirs:.6f}")
        found = on_ranks(project_runs.resume, 2, starts, load, folder, case="resuming on pp 2")
    _check_resumed(found, losses, weights)
    return "saved on dp 2 x tp 2 at step 3, resumed on pp 2: losses and weights of the uninterrupted training"


def _judge_step(fn: Callable[..., Any]) -> str:
    from dualpipe_course.whole import project_runs

    known = on_one_process(project_runs.one_process)
    case = "pp 2 x dp 2 x ep 2"
    answer = Without(fn, *WRITTEN)
    found = compare_on_ranks(
        project_runs.steps, 8, answer, known, case=case, why=_step_in_words, tolerance=1e-9, seconds=SECONDS
    )
    rank = max(range(8), key=lambda number: (found[number].costs["over"], found[number].costs["sent"]))
    sent, budget = (int(found[rank].costs[name]) for name in ("sent", "budget"))
    words = (
        f"rank {rank} sends {sent:,} bytes in the third step, the plan predicts {budget:,} with those of the log; "
        "a gradient travels once per step, and what no other rank needs does not travel"
    )
    check_limit(found, Limit("over", 0, words, least=-(2**40), scope="largest"), case)
    return f"three steps have the loss, norm and weights of one process; rank {rank} sent {sent:,} of {budget:,} bytes"


place = Implement(
    "project-1",
    "The mesh and the stages",
    "Write `place(rank, sizes, shapes)`: which part of which weights a rank holds, with the fewest bytes.",
    judge=_judge_place,
    minutes=30,
    points=3,
    hints=(
        "The last axis is contiguous: tp is rank % tp, dp is rank // tp % dp, pp is rank // (tp * dp).",
        "q, k, v, gate, up and the table are cut by rows; o and down by columns; weights of norms are held in full.",
        "Layers are alike, so the numbers per stage decide. Try every split of 6 into pp parts, with the table counted "
        "on both ends, and take the one whose fullest stage is smallest.",
    ),
)

gradients = Implement(
    "project-2",
    "The gradients",
    "Write `sum_gradients(parts)` and `clip(parts, max_norm)` for pp 2 x dp 2 x tp 2 and a tied table.",
    judge=_judge_gradients,
    minutes=40,
    points=4,
    hints=(
        "All weights are summed over dp. One weight stands on two stages as well: the table.",
        "A weight counts in the norm as often as ranks add it up. Sum squares over the world, each divided by the "
        "number of ranks that hold the same numbers.",
        "Same numbers: along dp always; along tp where `shard` is None; along pp for the table.",
    ),
)

optimizer = Implement(
    "project-3",
    "The sharded optimizer",
    "Write `ShardedAdam(weights, group, lr, betas, eps, weight_decay)` with `step()`: ZeRO-1 within its budgets.",
    judge=_judge_optimizer,
    minutes=35,
    points=4,
    hints=(
        "One flat vector, padded to a multiple of the ranks: reduce-scatter, update a shard, all-gather the weights.",
        "comm.reduce_scatter_single(output, input, group=group) and comm.all_gather_single(output, input, group) take "
        "contiguous tensors.",
        "What you keep between steps counts: two moments of a shard, and perhaps the shard's weights. A flat copy of "
        "all weights or gradients must not outlive the step.",
    ),
)

schedule = Puzzle(
    "project-4",
    "The schedule",
    "Find a program for 4 ranks and 8 microbatches: 78 ticks, at most 3 live activations per rank.",
    judge=_judge_schedule,
    minutes=25,
    points=3,
    hints=(
        "The last rank works 72 ticks and gets its first input at tick 6. In 78 ticks it never waits.",
        "A microbatch is alive on a rank from F to W. With three alive, a rank must run a W before its next F.",
        "Write W behind each I on the first rank; on the last, delay W while a neighbour waits for an I.",
    ),
)

resume = Implement(
    "project-5",
    "Data and a checkpoint",
    "Write `starts`, `save` and `load`: a training goes on under another plan with the same curve.",
    judge=_judge_resume,
    minutes=40,
    points=4,
    hints=(
        "random.Random(f'{step}/{number}').random() is a draw that depends on step and number alone.",
        "Write one file per rank with the name, the shard, the weight, and exp_avg, exp_avg_sq and step of "
        "parts.adam.state[parameter]. Ranks of dp hold copies: let one of them write, and wait for all with a barrier.",
        "When loading, read all files, lay the shards of each name into a full tensor, and cut the new rank's part.",
    ),
)

step = Implement(
    "project-6",
    "The step and its bytes",
    "Write `train_step(parts, batch, max_norm)` for pp 2 x dp 2 x ep 2: loss, norm, weights, and its bytes.",
    judge=_judge_step,
    minutes=40,
    points=5,
    hints=(
        "parts.model.begin_step, parts.runtime.step with weights of 1, sums, norm, clip, parts.adam.step. Gradients "
        "are added to those that are there, so empty them in every step.",
        'Experts (shard.mesh_axis == "ep") are summed over dp, all others over mesh.group("dp", "ep").',
        "Sum the gradients once per step, not once per microbatch, and add up small numbers in one all-reduce.",
    ),
)
