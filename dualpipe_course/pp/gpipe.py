"""Exercises of "GPipe": its numbers, its program, its step with recomputation, its memory, its weights.

Chapter: book/pp/gpipe.  Programs are judged by the validator and the simulator, gradients against one process in
float64, live activations by what autograd really keeps.
"""

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, check_limit, compare_on_ranks
from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.pp import gradients
from dualpipe_course.pp.gradients import ROWS, WIDTH
from dualpipe_course.pp.loops import only_whole_backwards
from dualpipe_course.pp.programs import check_rows, parse
from dualpipe_course.start.ranks import MS, SENDS, all_waited_for, check_messages_only
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import call_each, ended, partial_score, smallest_failing
from dualpipe_course.variants import Known
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp.simulator import simulate

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe_lab.launch.launcher import Results


NUMBERS = ("makespan", "bubble per rank", "peak of live activations")
# of the puzzle, with F = 1 and B = 2; GPipe with a flush after every three microbatches is the slowest
RANKS, MICROBATCHES, MAKESPAN, MEMORY, SLOWEST = 4, 8, 39, 3, 51
CHECKPOINT = "torch.utils.checkpoint:checkpoint"
IN_WORK = 3  # tensors of one microbatch that may be alive when its stage starts: x, and the last y and gradient
_SAVED = (
    "on rank {rank} autograd keeps {found} tensors at once, one microbatch needs {most} at most; run the forwards "
    "under torch.no_grad() and keep only the stage's input"
)
_HELD = (
    f"rank {{rank}} holds {{found}} tensor(s) of {ROWS} x {WIDTH} too many; until its backward a microbatch needs its "
    "input and nothing else, no output and no hidden layer"
)


def _slips(p: int, m: int, f: int, b: int) -> Known:
    free = (m + p - 1) * (f + b)
    return (
        (
            (
                free,
                f"this is the makespan with free messages; "
                f"each of {p - 1} boundaries delays the first F and the last B by one tick",
            ),
            (free + p - 1, f"gradients travel too: {p - 1} ticks on the way down and {p - 1} on the way up"),
            (
                free + 2 * m,
                "only the first activation and the last gradient make anyone wait longer, once per boundary",
            ),
            (m * (f + b), "this is one rank's work; the first and the last microbatch also pass the other stages"),
        ),
        (),
        ((p, "count the forwards that a rank has done before its first backward"),),
    )


def _smaller(rows: tuple[int, ...]) -> Any:
    for place, number in enumerate(rows):
        if sum(rows) > number:  # a batch without rows has no mean
            yield rows[:place] + rows[place + 1 :]
        if number > 1:
            yield (*rows[:place], number - 1, *rows[place + 1 :])


def _check_step(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> None:
    """Raise `Wrong` unless a step gives the gradients of one process, in GPipe's order, time, memory and messages."""
    best = 4 * (num_microbatches + num_ranks - 1)
    words = (
        "the step takes {found:g} ticks, GPipe's takes {most} (F 1, F again 1, B 2): some rank could work on a "
        "microbatch that is there, and still waits for others"
    )
    case = f"{num_ranks} rank(s), {num_microbatches} microbatch(es)"
    results = compare_on_ranks(
        _step,
        num_ranks,
        Without(fn, CHECKPOINT),
        num_microbatches,
        case=case,
        beside=lambda: gradients.beside(num_ranks, num_microbatches),
        why=lambda off: gradients.in_words(off, num_microbatches),
        clock="virtual",
    )
    one = [found.costs["saved by one"] for found in results]
    for limit in (
        Limit("saved", one, _SAVED, scope="each"),
        Limit("excess", 0, _HELD, scope="each"),
        Limit("ticks", best, words, scope="largest", shows=True),
    ):
        check_limit(results, limit, case)
    _check_messages(results, num_ranks, num_microbatches, case)


def _other_order(order: list[int], num_microbatches: int, is_last: bool) -> str:
    each = list(range(num_microbatches))
    if order == each + each or (is_last and order == each):
        return ""
    if len(order) != 2 * num_microbatches:
        return (
            f"ran its stage {len(order)} times, expected {2 * num_microbatches}: once in the forward, and again in the "
            "backward"
        )
    return f"ran its stage on microbatches {order}, expected {each + each}: all forwards, then the same"


def _check_messages(results: "Results", num_ranks: int, num_microbatches: int, case: str) -> None:
    check_messages_only(results, case)
    size = ROWS * WIDTH * 8
    for rank in range(num_ranks):
        neighbours = (rank > 0) + (rank < num_ranks - 1)
        sent = sum(results.ledger.sent(name, rank) for name in SENDS)
        if sent != neighbours * num_microbatches * size:
            raise Wrong(
                f"{case}: rank {rank} sent {sent} bytes, expected {neighbours * num_microbatches * size}: "
                f"per microbatch and neighbour one message of {ROWS} x {WIDTH} float64"
            )


class _Watch:
    """Notes on which microbatch a stage starts, and what is held at that moment."""

    def __init__(self, rank: int, num_microbatches: int, inputs: list["Tensor"]) -> None:
        import torch

        self.order: list[int] = []
        self.excess, self._before, self._number = 0, 0, num_microbatches
        with torch.no_grad():
            for below in range(rank):
                inputs = [gradients.make_stage(below)(x) for x in inputs]
        self._inputs = [x.clone() for x in inputs]

    def begin(self) -> None:
        """Everything that is alive now is the check's own."""
        from dualpipe_course.pp.saved import held

        held()
        gc.freeze()  # what is there already need not be looked through at every start
        self._before = held()

    def number_of(self, x: "Tensor") -> int | None:
        """The microbatch whose input this is."""
        import torch

        same = (m for m, known in enumerate(self._inputs) if x.shape == known.shape and torch.allclose(x, known))
        return next(same, None)

    def starts(self, module: Any, args: tuple["Tensor", ...]) -> None:
        """Called by the stage before each forward."""
        from dualpipe_course.pp.saved import held
        from dualpipe_lab.launch.context import rank_context

        number = self.number_of(args[0])
        self.order.append(-1 if number is None else number)
        needed = self._number + len(rank_context().in_flight) + IN_WORK
        if any(grad != [gradients.OLD] * len(grad) for grad in gradients.grads_of(module)):
            # a backward has been: the inputs may carry their gradients, and the last weights' may have a name
            needed += len(self.order) + sum(p.numel() for p in module.parameters()) // (ROWS * WIDTH) + 1
        self.excess = max(self.excess, (held() - self._before) // (ROWS * WIDTH) - needed)


def _step(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> Found:
    import torch
    from torch import nn

    from dualpipe_course.pp.saved import Saved
    from dualpipe_course.pp.timed import Timed
    from dualpipe_lab.launch.context import rank_context

    stage, inputs, targets = gradients.make_stage(rank), *gradients.make_batch([ROWS] * num_microbatches)
    probe = Saved()
    with probe:
        kept = nn.functional.mse_loss(stage(inputs[0].clone().requires_grad_()), targets[0])
        one = probe.peak + 1  # the division of the loss may keep one more
        del kept
    watch, timed = _Watch(rank, num_microbatches, inputs), Timed(stage, forward_ms=1, backward_ms=2)
    timed.register_forward_pre_hook(watch.starts)
    saved = Saved(free=lambda x: x.numel() <= 1 or watch.number_of(x) is not None)  # the inputs are to be kept
    gradients.leave_gradients(stage)
    torch.manual_seed(100 + rank)
    like = torch.empty(ROWS, WIDTH, dtype=torch.float64)
    first, last = rank == 0, rank == world_size - 1
    watch.begin()
    with saved:
        fn(rank, world_size, timed, inputs if first else None, targets if last else None, num_microbatches, like)
    all_waited_for()
    ticks = rank_context().clock.now() / MS
    costs = {"saved": saved.peak, "saved by one": one, "excess": watch.excess, "ticks": ticks}
    changed = _other_order(watch.order, num_microbatches, last)
    return gradients.found_in(stage)._replace(costs=costs, changed=changed)


def _judge_program(fn: Callable[..., Any]) -> str:
    sizes = sorted(((p, m) for p in range(1, 6) for m in range(1, 7)), key=lambda size: (sum(size), size))
    results = call_each(gradients.without_library(fn), [*sizes, (8, 20)])
    for (p, m), (fine, value) in zip([*sizes, (8, 20)], results, strict=True):
        case = f"{p} rank(s), {m} microbatch(es)"
        if not fine:
            raise Wrong(ended(case, value))
        check_rows(value, p, m, case)
    return "valid, free of deadlock and as short as GPipe on 31 sizes, messages included"


def _judge_less_memory(answer: object) -> str:
    found = parse(answer, RANKS, MICROBATCHES)
    only_whole_backwards(found)
    timeline = simulate(found)
    peaks = [timeline.peak_activations(rank) for rank in range(RANKS)]
    if max(peaks) > MEMORY:
        worst = peaks.index(max(peaks))
        raise Wrong(
            f"{timeline.makespan} ticks, but rank {worst} holds {peaks[worst]} activations, the limit is {MEMORY}; "
            f"all {peaks}",
            picture=timeline,
        )
    if timeline.makespan > MAKESPAN:
        raise Wrong(
            f"it fits, with {timeline.makespan} ticks; {MAKESPAN} are possible. Rank 0 is idle for "
            f"{timeline.bubble_time(0)}",
            score=partial_score(timeline.makespan, SLOWEST, MAKESPAN),
            picture=timeline,
        )
    return f"{timeline.makespan} ticks with {sum(peaks)} activations in all; with room for 3 no order is quicker"


def _judge_unequal_microbatches(fn: Callable[..., Any]) -> str:
    cases = [(2,), (2, 2), (2, 1), (1, 2, 3), (1, 1, 4, 2, 2), (3, 0, 2)]
    reports = gradients.accumulate_reports(fn, cases)
    failing = next((case for case, report in zip(cases, reports, strict=True) if report), None)
    if failing is None:
        return "gradients and loss equal those of the whole batch, for equal and unequal microbatches"
    smallest = smallest_failing(failing, lambda case: bool(gradients.accumulate_reports(fn, [case])[0]), _smaller)
    raise Wrong(gradients.accumulate_reports(fn, [smallest])[0])


numbers = Predict(
    "gpipe-1",
    "Three numbers",
    NUMBERS,
    lambda p, m, f, b: (end := (m + p - 1) * (f + b) + 2 * (p - 1), end - m * (f + b), m),
    "on {p} ranks with {m} microbatches; F takes {f} ticks, B takes {b},",
    minutes=5,
    points=1,
    trail=True,
    hints=(
        "With free messages the makespan is (m + p - 1)(t_F + t_B). What does a latency of 1 tick add, and how often?",
        "The bubble of a rank is the makespan minus its work, m (t_F + t_B).",
        "No B runs before the last F. How many activations does a rank hold then?",
    ),
    slips=_slips,
    p=(4, 3, 5),
    m=(6, 5, 7, 8),
    f=(2, 3),
    b=(4, 5, 6),
    called={"p": "ranks", "m": "microbatches", "f": "F", "b": "B"},
)

program = Implement(
    "gpipe-2",
    "The program, with its messages",
    "Write GPipe's rows with sends and receives for any number of ranks and microbatches.",
    judge=_judge_program,
    minutes=15,
    points=3,
    hints=(
        "Write one rank first: for each microbatch RECV_F, F, SEND_F; then for each RECV_B, B, SEND_B.",
        "Which of the four messages does stage 0 not have? And the last stage?",
        "A send carries the stage that made the result: 0SEND_F3 leaves stage 0 and meets 1RECV_F3.",
    ),
)

recompute_step = Implement(
    "gpipe-3",
    "Keep the input, compute again",
    "Run one GPipe step that keeps one input per microbatch and recomputes the rest.",
    cases=((1, 1), (1, 3), (2, 1), (2, 8), (3, 2)),
    judge=_check_step,
    right="gradients equal one process, one microbatch's activations live, 2 (p - 1) m messages",
    minutes=35,
    points=4,
    hints=(
        "In the forwards, run the stage under torch.no_grad() and keep only its input.",
        "In the backwards, run the stage again on the kept input, this time with gradients, and start the chain rule "
        "with what the next stage sent.",
        "On the last stage the loss is computed in the backward, divided by the number of microbatches. The input of "
        "every stage but the first needs requires_grad_() before the second run.",
    ),
)

less_memory = Puzzle(
    "gpipe-4",
    "Room for three",
    "Find a program of F and B for 4 ranks and 8 microbatches: 39 ticks, at most 3 live activations per rank.",
    judge=_judge_less_memory,
    minutes=20,
    points=2,
    hints=(
        "From its F on rank 0 to the end of its B there, a microbatch takes 4 + 8 ticks if it never waits. With room "
        "for 3, how many such hops follow one another?",
        "Which is more urgent on rank 1, a backward that makes room on rank 0 or a forward that fills the ranks below?",
        "Let every rank run a backward as soon as its gradient is there, and a forward only where none is. Rank 1 "
        "begins 1F0 1F1 1F2 1B0 1B1 1F3.",
    ),
)

unequal_microbatches = Repair(
    "gpipe-5",
    "The mean of means",
    "Repair `accumulate(model, loss_fn, inputs, targets)` for microbatches of unequal size.",
    judge=_judge_unequal_microbatches,
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "Compare the gradients for microbatches of 2 and 2 rows, then of 3 and 1.",
        "loss_fn is the mean over the rows of one microbatch. Which share of the batch's rows is that?",
        "A microbatch weighs by its rows over all rows. 1/M is that only where all have equally many.",
    ),
)
