"""A step of the last run, looked at: its measured timeline over the simulated one, its bytes beside the derived ones.

In: the texts of all parts.  Out: two timelines of the pipeline, and what a rank sends in the first step.
Each action takes its time on the wall clock: what it computes, and a sleep for the rest, so that four ranks do not
fight for two cores.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dualpipe_course.own import finder
from dualpipe_course.own.trainings import ORDERS, TOKENS
from dualpipe_course.trial import on_ranks
from dualpipe_lab import Cost, Program, simulate
from dualpipe_lab.timeline.model import Timeline

MS = 1_000_000  # nanoseconds
TICK = 30 * MS
COST = Cost(F=TICK, B=2 * TICK)  # I and W are half of B each, a pair takes F and B
NUMBER = 8  # bytes of a float64 and of an int64
STEPS = 4


class Look(NamedTuple):
    """What was found.

    Attributes:
        simulated, measured: of the pipeline; the measured one is the step of median length, of member 0 of each group.
        derived: bytes that rank 0 sends in the first step, by what for; without the shapes that messages say, and for
            a ring attention that passes on every block, also one that is hidden from the ranks behind.
        counted: bytes that the ledger has.
    """

    simulated: Timeline
    measured: Timeline
    derived: dict[str, int]
    counted: int

    def __str__(self) -> str:
        rows = [f"{num:8,}  {what}" for what, num in self.derived.items()]
        both = f"{sum(self.derived.values()):8,}  derived; counted {self.counted:,}, with the shapes that messages say"
        return "\n".join(["bytes that rank 0 sends in a step:", *rows, both])


def look(texts: Mapping[str, str]) -> Look:
    """Run DualPipe of the last run with these parts."""
    positions, size, _, num_microbatches = ORDERS["DualPipe"]
    case, num_ranks = "a step of DualPipe", positions * size
    rows = on_ranks(_rows, 1, dict(texts), case=case)[0]
    program = Program.parse("DualPipe", rows)
    counted = on_ranks(_steps, num_ranks, dict(texts), 1, 0.0, case=case).ledger.sent(rank=0)
    run = on_ranks(_steps, num_ranks, dict(texts), STEPS, TICK / MS, case=case).timeline
    steps = sorted(run.steps()[1:], key=lambda step: step.makespan)
    middle = steps[len(steps) // 2]
    spans = [
        [span._replace(rank=position) for span in middle.spans_by_rank[position * size]]
        for position in range(positions)
    ]
    measured = Timeline("DualPipe by these parts", spans, [], "measured", "ns")
    return Look(simulate(program, COST, unit="ns"), measured, derived(num_microbatches), counted)


def derived(num_microbatches: int) -> dict[str, int]:
    """Bytes that rank 0 sends in a step, by what for: it holds both stages, and each microbatch passes one of them."""
    from dualpipe_ours.plain_model import EXPERTS, WIDTH, before_experts, gates_of, layer, make_batch, make_layers

    positions, size, num_stages, _ = ORDERS["DualPipe"]
    layers, tokens = make_layers(4), TOKENS // size * WIDTH * NUMBER  # of one microbatch, on one member
    per_stage, half = len(layers) // num_stages, num_microbatches // 2
    x, crossing = layers[0]["embed"][make_batch(num_microbatches, TOKENS)[0]], 0
    for number, w in enumerate(layers):
        is_chosen = gates_of(before_experts(x, w)[1], w) > 0
        x = layer(x, w)
        here = slice(0, half) if number < per_stage else slice(half, None)  # the microbatches that pass it on rank 0
        for member, own in enumerate(is_chosen[here].chunk(size, 1)):
            crossing += int(own.sum()) - int(own.chunk(size, 2)[member].sum())
    passes = num_microbatches * per_stage
    return {
        "activations and their gradients": num_microbatches * tokens,
        "keys and values, and their gradients": passes * 4 * 2 * tokens,
        "tokens of the cut MLP": passes * 4 * tokens,
        "rows for experts, and back": 2 * crossing * WIDTH * NUMBER,
        "their numbers": passes * (EXPERTS // size) * NUMBER,
        "sums of gradients, and new weights": sum(
            _ring_bytes(sum(sizes), num_ranks)
            for stage in range(num_stages)
            for sizes, num_ranks in _sums(layers[stage * per_stage :][:per_stage], positions, size)
        ),
        "the loss": _ring_bytes(1, positions * size),
    }


def _ring_bytes(numel: int, num_ranks: int) -> int:
    """A reduce-scatter and an all-gather: 2 (N - 1) blocks."""
    return 2 * (num_ranks - 1) * -(-numel // num_ranks) * NUMBER


def _sums(layers: list[dict[str, Any]], positions: int, size: int) -> list[tuple[list[int], int]]:
    """Numbers of the common and of the split weights of a stage, each with how many ranks sum them."""
    from dualpipe_ours.plain_model import leaves

    split: list[int] = []
    common: list[int] = []
    for (_, name, expert), leaf in leaves(layers).items():
        is_split = expert is not None or name in ("up", "down")
        (split if is_split else common).append(leaf.numel() // (size if is_split else 1))
    return [(common, positions * size), (split, positions)]


def _rows(rank: int, world_size: int, texts: Mapping[str, str]) -> list[str]:
    finder.install(texts.__getitem__)
    from mine.rows_dualpipe import dualpipe_rows

    positions, _, _, num_microbatches = ORDERS["DualPipe"]
    return list(dualpipe_rows(positions, num_microbatches))


def _steps(rank: int, world_size: int, texts: Mapping[str, str], num_steps: int, tick: float) -> None:
    """Train; with a tick in ms, each action is a span, and takes as long as its cost says."""
    finder.install(texts.__getitem__)
    from mine.execute import KINDS
    from mine.rows_dualpipe import dualpipe_place, dualpipe_rows
    from mine.train import Trainer

    from dualpipe_ours.plain_model import HEADS, LR, ROUTE, make_batch, make_layers

    positions, size, num_stages, num_microbatches = ORDERS["DualPipe"]
    rows, place = dualpipe_rows(positions, num_microbatches), dualpipe_place(positions, num_microbatches)
    trainer = Trainer(make_layers(4), rows, place, num_stages, size, HEADS, ROUTE, LR)
    if tick:
        for kind, ticks in {"F": 1, "B": 2, "I": 1, "W": 1, "OVERLAP_F_B": 3}.items():
            KINDS[kind] = _timed(KINDS[kind], ticks * tick)
    for _ in range(num_steps):
        trainer.step(*make_batch(num_microbatches, TOKENS))


def _timed(run: Callable[..., Any], ms: float) -> Callable[..., Any]:
    from time import perf_counter

    from dualpipe_lab.launch.context import rank_context
    from dualpipe_lab.pp.program import parse_action
    from dualpipe_lab.pp.runtime.stage import span_title

    def timed(state: Any, token: str) -> None:
        here, start = rank_context(), perf_counter()
        with here.span(*span_title(parse_action(token))):
            run(state, token)
            here.compute(max(0.0, ms - 1000 * (perf_counter() - start)))

    return timed
