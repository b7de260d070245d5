"""Exercises of "DualPipe": its waiting, its steps, a better order, a queue of weight gradients, a step of two copies.

Chapter: book/pp/dualpipe.  Rows are judged by the validator, the simulator and the library's rows, which for 8 ranks
and 20 microbatches are DeepSeek's action by action; the queue by what has been added after every word.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.differences import TOLERANCE
from dualpipe_course.pp import clipping, programs
from dualpipe_course.pp.gradients import without_library
from dualpipe_course.trial import call_each, ended, on_ranks
from dualpipe_course.variants import WORDS, Known
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Action, B, F, I, Overlap, Program, ProgramStep, W
from dualpipe_lab.pp.schedules.dualpipe import (
    dualpipe,
    dualpipe_bubble,
    dualpipe_peak_activations,
    dualpipev,
    eight_steps,
)
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.timeline import Time

if TYPE_CHECKING:
    from torch import Tensor


NUMBERS = ("bubble of rank 2", "bubble of rank 0", "published bubble", "peak of rank 0")
PLENTY = 99
# ranks, microbatches, whether cut in half, weight gradients that may wait
CASES = [(2, 4, False, PLENTY), (1, 2, True, PLENTY), (2, 6, False, PLENTY), (4, 8, False, PLENTY)]
CASES += [(2, 4, True, PLENTY), (3, 7, True, PLENTY), (2, 4, False, 0), (4, 8, False, 1), (4, 8, False, 0)]
CASES += [(3, 7, True, 1), (4, 10, True, 0), (6, 14, False, 2), (8, 20, False, PLENTY), (8, 20, False, 3)]
COST = Cost(F=4, I=4, W=2, overlap=8)  # pairs gain, and W is short: a wrong order shows
RANKS, MICROBATCHES, EASY, LEAST, ROOM = 4, 6, 25, 19, 4  # of the puzzle, F = I = W = 1
Words = Sequence[str]
SMALL = ("B0", "I0 W", "I0 I0 W W", "I1 I0 W W", "I0 B1 W", "I0 I1 B0 W B1 I0 W W")


def _in_the_middle(f: int, i: int, w: int, pair: int) -> Sequence[Time] | None:
    if not f + w < pair < f + i + w:
        return None
    cost = Cost(F=f, I=i, W=w, overlap=pair)
    middle, outer = (dualpipe_bubble(6, 14, rank, cost) for rank in (2, 0))
    return middle, outer, 2 * (pair + i - 2 * w), dualpipe_peak_activations(6)


def _slips(f: int, i: int, w: int, pair: int) -> Known:
    answers = _in_the_middle(f, i, w, pair)
    assert answers is not None
    slower, fewer = pair - i - w, max(i - w, 0)
    return (
        (
            (
                2 * (f + slower + fewer),
                "there is one more term: I is slower than F here, so step 3 holds gradients up, "
                "(p/2 - 1)(t_I - t_F) - t_F",
            ),
            (2 * (pair + i - 2 * w), "the published form holds for t_F = t_I >= t_W only"),
            (
                2 * (2 * f + fewer),
                f"a pair takes {pair} ticks, {WORDS[f - slower]} less than F and B one after the other",
            ),
            (
                2 * (f + slower) + fewer,
                "step 7 counts max(t_I - t_W, 0) per rank that lies inside, and step 3 has its term",
            ),
        ),
        ((int(answers[0]), "all ranks end together, and rank 2 has 7 pairs, rank 0 has 6"),),
        (),
        ((6, "every rank holds p before its first pair, and the pair's forward adds one"),),
    )


class _EveryRank:
    """Asks the learner's function for every row of a program."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, p: int, m: int, cut: bool, room: int) -> list[Any]:
        """Return the rows."""
        return [self.fn(rank, p, m, cut, room) for rank in range(p)]


def _check_rows(value: list[Any], p: int, m: int, cut: bool, room: int, case: str) -> None:
    if any(type(row) is not str for row in value):
        raise Wrong(f"{case}: expected a line of text for each rank, got {type(value[0]).__name__}")
    full = (dualpipev if cut else dualpipe)(p, m)
    rows = [_with_room(row, rank, p, m, cut, room) for rank, row in enumerate(full.ranks)]

    def step(rank: int, place: int) -> str:
        numbers = [number for _, number in rows[rank]]
        return f", in step {numbers[place] if place < len(numbers) else 8}"

    programs.check_actions(value, full.with_ranks([[action for action, _ in row] for row in rows]), case, COST, step)


def _with_room(
    row: Sequence[ProgramStep], rank: int, p: int, m: int, cut: bool, room: int
) -> list[tuple[ProgramStep, int]]:
    """The actions of a row with the number of their step, where at most `room` weight gradients wait for their W."""
    position, num_positions, per_flow = (rank, p, m) if cut else (min(rank, p - 1 - rank), p // 2, m // 2)
    lengths = map(len, eight_steps(position, num_positions, per_flow))
    numbers = [number for number, length in enumerate(lengths, start=1) for _ in range(length)]
    too_many = max(position + 1 - room, 0)  # of the I in step 6
    kept: list[tuple[ProgramStep, int]] = []
    waiting: list[Action] = []
    for action, number in zip(row, numbers, strict=True):
        if isinstance(action, Overlap) or action.kind not in (I, W):
            kept.append((action, number))
        elif action.kind == W:
            kept += [(waiting.pop(0), number)] if waiting else []
        elif room == 0 or (number == 6 and too_many > 0):
            too_many -= number == 6
            kept.append((action._replace(kind=B), number))
        else:
            kept.append((action, number))
            waiting.append(action._replace(kind=W))
    return kept


def _with_mirrors(answer: object) -> list[str]:
    """Rows of ranks 0 and 1, and for ranks 2 and 3 the same for the other direction's microbatches."""
    rows = [row for row in (answer.split("\n") if isinstance(answer, str) else _texts(answer)) if row.strip()]
    if len(rows) != RANKS // 2:
        raise Wrong(f"{len(rows)} rows; write those of ranks 0 and 1, the check mirrors them")
    try:
        upper = Program.parse("yours", rows)
    except ValueError as error:
        raise Wrong(str(error)) from None
    lower = [[_mirrored(step) for step in row] for row in reversed(upper.ranks)]
    return [*upper.rows(), *upper.with_ranks(lower).rows()]


def _texts(answer: object) -> list[str]:
    if not isinstance(answer, (list, tuple)) or not all(isinstance(row, str) for row in answer):
        raise Wrong(f"expected two lines of text, such as '0F0 3F3 3B3 0B0', got {type(answer).__name__}")
    return list(answer)


def _mirrored(step: ProgramStep) -> ProgramStep:
    if isinstance(step, Overlap):
        return Overlap(_other(step.forward), _other(step.backward))
    return _other(step)


def _other(action: Action) -> Action:
    half = MICROBATCHES // 2
    return action._replace(microbatch=action.microbatch + (half if action.microbatch < half else -half))


def _rows() -> Iterator[list[str]]:
    """Yield rows of words to try: small ones, then the backward words of DualPipe's ranks."""
    yield from (words.split() for words in SMALL)
    for position, num_positions, per_flow in ((0, 1, 2), (0, 2, 4), (1, 2, 4), (0, 4, 8), (2, 4, 10), (3, 4, 10)):
        steps = eight_steps(position, num_positions, per_flow)
        parts = [part for step in steps for word in step for part in word.split("&")]
        yield [part for part in parts if part[0] != F]


def _try_rows(rank: int, world_size: int, fn: Callable[..., Any]) -> str:
    """Run the learner's function on every beginning of every row; say what is wrong first."""
    for words in _rows():
        before = [0.0]
        for length in range(1, len(words) + 1):
            report, before = _try(fn, words[:length], before)
            if report:
                return f"after {' '.join(words[:length])}: {report}"
    return ""


def _try(fn: Callable[..., Any], words: Words, before: list[float]) -> tuple[str, list[float]]:
    weights, grads, inputs, dys = _tensors()
    sent = fn(list(words), weights, grads, inputs, dys)
    found = _numbers(grads)
    order = _order(words)
    weights, expected, inputs, dys = _tensors()
    for flow, i in order.added:
        expected[flow] += dys[flow][i].T @ inputs[flow][i]
    if not isinstance(sent, list) or len(sent) != len(order.backwards):
        many = len(sent) if isinstance(sent, list) else type(sent).__name__
        return f"it returned {many} gradients for inputs, expected {len(order.backwards)}, one per I and B", found
    for (flow, i), dx in zip(order.backwards, sent, strict=True):
        wanted = dys[flow][i] @ weights[flow]
        if dx.shape != wanted.shape:
            return f"an input's gradient has shape {list(dx.shape)}, its input {list(wanted.shape)}", found
        if not _close(dx.flatten().tolist(), wanted.flatten().tolist()):
            return f"the input's gradient of flow {flow}'s microbatch {i} is wrong", found
    if _close(found, _numbers(expected)):
        return "", found
    return _explain(words[-1], found, before, order), found


class _order:  # noqa: N801 - a record of one function's reckoning
    """Which microbatches have had their backward, and which weight gradients have been added, in order."""

    def __init__(self, words: Words) -> None:
        self.backwards: list[tuple[int, int]] = []
        self.added: list[tuple[int, int]] = []
        waiting: list[tuple[int, int]] = []
        done = [0, 0]
        for word in words:
            if word == W:
                self.added.append(waiting.pop(0))
                continue
            flow = int(word[1])
            this = (flow, done[flow])
            done[flow] += 1
            self.backwards.append(this)
            (self.added if word[0] == B else waiting).append(this)


def _explain(word: str, found: list[float], before: list[float], order: _order) -> str:
    before = before if len(before) == len(found) else [0.0] * len(found)
    change = [a - b for a, b in zip(found, before, strict=True)]
    if word[0] == I:
        return "an I adds no weight gradient; that waits for a W" if any(change) else "the gradients have changed"
    flow, i = order.added[-1]
    due = f"flow {flow}'s microbatch {i}, " + ("its own" if word[0] == B else "the oldest that waits")
    if not any(change):
        return f"{word} added nothing, expected {due}"
    _, _, inputs, dys = _tensors()
    for f, j in order.backwards:
        _, grads, _, _ = _tensors()
        grads[f] += dys[f][j].T @ inputs[f][j]
        if _close(change, _numbers(grads)):
            return f"{word} added the weight gradient of flow {f}'s microbatch {j}, expected that of {due}"
    return f"the gradients changed by no microbatch's weight gradient; expected {word} to add that of {due}"


def _tensors() -> tuple[list["Tensor"], list["Tensor"], list[list["Tensor"]], list[list["Tensor"]]]:
    """Per flow a weight (2 x 3), its gradient, and ten microbatches' inputs and gradients of outputs."""
    import torch

    draw = torch.Generator().manual_seed(11)

    def make(*shape: int) -> "Tensor":
        return torch.randn(shape, dtype=torch.float64, generator=draw)

    weights, inputs = [make(2, 3), make(2, 3)], [[make(4, 3) for _ in range(10)] for _ in range(2)]
    return weights, [w.new_zeros(2, 3) for w in weights], inputs, [[make(4, 2) for _ in range(10)] for _ in range(2)]


def _numbers(tensors: Sequence["Tensor"]) -> list[float]:
    return [value for tensor in tensors for value in tensor.flatten().tolist()]


def _close(found: Sequence[float], expected: Sequence[float]) -> bool:
    return len(found) == len(expected) and all(
        abs(a - b) <= 100 * TOLERANCE for a, b in zip(found, expected, strict=True)
    )


def _judge_rows(fn: Callable[..., Any]) -> str:
    results = call_each(without_library(_EveryRank(fn)), CASES)
    for (p, m, cut, room), (fine, value) in zip(CASES, results, strict=True):
        case = f"{'DualPipeV' if cut else 'DualPipe'}, {p} rank{'s' * (p > 1)}, {m} microbatches"
        case += "" if room == PLENTY else f", room for {room} waiting"
        if not fine:
            raise Wrong(ended(case, value))
        _check_rows(value, p, m, cut, room, case)
    return (
        f"{len(CASES)} programs action by action; DualPipe's for 8 ranks and 20 microbatches is the published one if "
        "all weight gradients may wait"
    )


def _judge_fewer(answer: object) -> str:
    timeline = simulate(programs.parse(_with_mirrors(answer), RANKS, MICROBATCHES))
    peak = max(map(timeline.peak_activations, range(RANKS)))
    quick = max(0, EASY - timeline.makespan) / (EASY - LEAST)
    if timeline.makespan > LEAST:
        late = f"valid, {timeline.makespan} ticks with {peak} activations; {LEAST} are enough with {ROOM}"
        score = round((0.9 if peak <= ROOM else 0.45) * quick, 2)
        raise Wrong(f"{late}. Rank 1 is idle for {timeline.bubble_time(1)}", score=score, picture=timeline)
    if peak > ROOM:
        raise Wrong(f"{LEAST} ticks, but a rank holds {peak} activations; {ROOM} are enough", 0.6, timeline)
    return f"{timeline.makespan} ticks with {peak} activations: 18 of work, and one until rank 1 has its first input"


def _judge_queue(fn: Callable[..., Any]) -> str:
    if report := on_ranks(_try_rows, 1, fn, case="running backward words")[0]:
        raise Wrong(report)
    return "every I's weight gradient waits for its own W, oldest first, on all ranks of DualPipe that were tried"


numbers = Predict(
    "dualpipe-1",
    "Where the published form is wrong",
    NUMBERS,
    _in_the_middle,
    "F takes {f} ticks, I {i}, W {w}, and a pair {pair}.",
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "In the middle: (p/2 - 1)(t_F + (t_F&B - t_B) + max(t_I - t_W, 0)), and a term for step 3 where t_I > t_F.",
        "All ranks end the step together. Each pair saves t_F + t_B - t_F&B of work, so a rank with fewer pairs works "
        "longer and waits less.",
        "Count the pairs of steps 4 and 5. For q = 0 they are 2 (m/2 - p + 1) + (p/2 - 1); the rank in the middle runs "
        "one of its 2 (m/2 - p + p/2) as two halves.",
    ),
    slips=_slips,
    f=(4, 3, 5),
    i=(7, 6, 8),
    w=(5, 4),
    pair=(14, 13, 15),
    called={"f": "F", "i": "I", "w": "W"},
)

rows = Implement(
    "dualpipe-2",
    "The missing steps",
    "Complete `one_row(rank, num_ranks, num_microbatches, cut, room)`: DualPipe's rows, also with little room.",
    judge=_judge_rows,
    minutes=30,
    points=4,
    hints=(
        "Steps 3, 5 and 7 are repeated once for each rank between this one and the middle, `inside`; steps 6 and 8 "
        "`outside` times.",
        "Step 6 has 2 * outside backwards, of flow 1 and flow 0 in turn. From its middle on they are I instead of B, "
        "as far as there is room. How many W are then left for step 8?",
        "DualPipeV's ranks are DualPipe's upper half: rank r is at position r of p, and what comes back is flow 1, on "
        "stage 2 p - 1 - r, with the same microbatches.",
    ),
)

fewer = Puzzle(
    "dualpipe-3",
    "Too few for DualPipe",
    "Find a mirrored program for 4 ranks and 6 microbatches: 19 ticks, at most 4 live activations per rank.",
    judge=_judge_fewer,
    minutes=40,
    points=3,
    hints=(
        "Rank 1 cannot start before tick 1. Where else must it wait? Nowhere, if W fills its gaps and the end.",
        "Write I W for every B first, and look at the picture: an I that a neighbour waits for "
        "goes first, a W that no rank waits for goes where the rank would be idle.",
        "Rank 0 can begin 0F0 0F1 0F2 3F3 3I3 3W3 3F4: three of its own before the first from the other end.",
    ),
)

queue = Repair(
    "dualpipe-4",
    "What W remembers",
    "Repair `backwards(words, weights, grads, inputs, dys)`: B adds its own weight gradient, W the oldest waiting.",
    judge=_judge_queue,
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "Where W follows its I at once the gradient is right. Try I0 I0 W W on paper: what are x and dy when W runs?",
        "A function made in a loop does not keep the loop's variables, it looks at them when it runs.",
        "Keep a tuple of flow, dy and x. W takes from the front of the queue: the oldest holds its activation longest.",
    ),
)

clipped_step = Repair(
    "dualpipe-5",
    "Two copies, one step",
    "Repair `clipped_step(rank, world_size, stages, max_norm, lr)`: both copies make the step of one process.",
    cases=((2, 4, 0.1), (4, 8, 0.1), (4, 8, 10.0)),
    judge=clipping.check_clipped_step,
    right="2 and 4 ranks, clipped or not: the norm of one process, its step, and both copies equal to the last bit",
    minutes=25,
    points=3,
    hints=(
        "After the step, compare the copies of stage 0 on the first and on the last rank. Are they still equal?",
        "A rank and its mirror have seen different microbatches. Sum each gradient over a group of these two; all "
        "ranks make all groups, and both mirrors take their stages in one order.",
        "Afterwards both mirrors have the same gradients, and a sum over all ranks counts each twice. Let rank r add "
        "the squares of stage r alone.",
    ),
)
