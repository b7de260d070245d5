"""Exercises of "DualPipe": its rows, and a queue of weight gradients.

Chapter: book/pp/dualpipe.  Rows are judged by the validator, the simulator and the library's rows, which for 8 ranks
and 20 microbatches are DeepSeek's action by action; the queue by what has been added after every word.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from dualpipe_course.declared import Repair
from dualpipe_course.differences import TOLERANCE
from dualpipe_course.own.part import Alone, Part
from dualpipe_course.pp import programs
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import B, F, I, W
from dualpipe_lab.pp.schedules.dualpipe import dualpipe, eight_steps

if TYPE_CHECKING:
    from torch import Tensor


COST = Cost(F=4, I=4, W=2, overlap=8)  # pairs gain, and W is short: a wrong order shows
Words = Sequence[str]
STEPS = (  # of a position with `inside` positions up to the middle, `outside` of them from its end to itself
    "2 inside times F0: the way to the middle and back",
    "outside times F0 F1: microbatches of the other direction have arrived",
    "inside times I1 W F1: what lies inside waits for I, and nothing for W",
    "m/2 - p + outside times F0&B1 F1&B0; in the middle the first pair is F0 B1, one after the other",
    "inside times B1 F1&B0: flow 0 has no forwards left",
    "2 outside backwards, of flow 1 and flow 0 in turn, the second half of them I",
    "inside times W I0",
    "outside times W",
)
BY_HAND: tuple[tuple[list[str], tuple[tuple[int, int], tuple[int, int]], str], ...] = (  # words, their flows, the row
    (["F0"], ((0, 0), (1, 2)), "0F0"),
    ([], ((0, 0), (1, 2)), ""),
    (["F0", "F1", "F0", "B1", "B0"], ((0, 0), (1, 2)), "0F0 1F2 0F1 1B2 0B0"),
    (["F1", "F0", "F1&B0", "B1"], ((2, 5), (1, 0)), "1F0 2F5 (1F1;2B5)OVERLAP_F_B 1B0"),
    (["F0", "F0", "B0", "I0", "W"], ((3, 4), (0, 0)), "3F4 3F5 3B4 3I5 3W5"),
    (["F0", "F1", "I1", "I0", "W", "W"], ((0, 0), (3, 4)), "0F0 3F4 3I4 0I0 3W4 0W0"),
    (["F0", "F0", "I0", "F0&B0", "W", "I0", "W"], ((1, 0), (6, 0)), "1F0 1F1 1I0 (1F2;1B1)OVERLAP_F_B 1W0 1I2 1W2"),
    (["F0", "F1", "I0", "I1", "W", "W"], ((11, 12), (20, 12)), "11F12 20F12 11I12 20I12 11W12 20W12"),
)
SMALL = ("B0", "I0 W", "I0 I0 W W", "I1 I0 W W", "I0 B1 W", "I0 I1 B0 W B1 I0 W W")


def _look_at_words(position: int, p: int, m: int) -> str:
    """Compare the words of a position with the eight steps, and name the step of the first that differs."""
    from mine.rows_dualpipe import words

    value = words(position, p, m)
    if not isinstance(value, (list, tuple)) or any(type(word) is not str for word in value):
        return f"words returns one list of words such as 'F0' and 'F1&B0', got {value!r:.60}"
    steps = eight_steps(position, p // 2, m // 2)
    known = [(word, number) for number, step in enumerate(steps) for word in step]
    for place, (ours, (theirs, number)) in enumerate(zip_longest(value, known, fillvalue=("nothing", 7))):
        if ours != theirs:
            ours = ours if isinstance(ours, str) else "nothing"
            pairs = [sum("&" in word for word in row) for row in (value, [word for word, _ in known])]
            counted = "" if pairs[0] == pairs[1] else f"; it has {pairs[0]} pairs, expected {pairs[1]}"
            lies = f"inside is {p // 2 - 1 - position} and outside {position + 1}"
            return (
                f"word {place + 1} is {ours}, expected {theirs}{counted}. Step {number + 1} is {STEPS[number]}; "
                f"here {lies}"
            )
    return ""


def _look_at_named(words: list[str], flows: tuple[tuple[int, int], tuple[int, int]], expected: str) -> str:
    """Compare a row with one that was named by hand; twice, since nothing may be left of the first call."""
    from mine.rows_dualpipe import named

    for again in (False, True):
        row = named(list(words), flows)
        if type(row) is not str:
            return f"named returns a row, one text, got {type(row).__name__}"
        for place, (ours, theirs) in enumerate(zip_longest(row.split(), expected.split(), fillvalue="nothing")):
            if ours != theirs:
                said = f"action {place + 1} is {ours}, expected {theirs}{_naming(words, place)}"
                return f"{said}; the first call was right, so something is kept from it" if again else said
    return ""


def _naming(words: Words, place: int) -> str:
    word = words[min(place, len(words) - 1)] if words else ""
    if word == W:
        return ". W belongs to the oldest I that waits, of either flow"
    if "&" in word:
        return ". A pair is (forward;backward)OVERLAP_F_B, and its halves count as F and B do"
    if word[:1] == F:
        return ". The forwards of a flow are counted from its first microbatch"
    return ". B and I of a flow have one count: both are its next backward"


def _look_at_rows(p: int, m: int) -> str:
    """Compare the rows with the published ones, and the place with them."""
    from mine.rows_dualpipe import dualpipe_place, dualpipe_rows

    expected = dualpipe(p, m)

    def step(rank: int, place: int) -> str:
        steps = eight_steps(min(rank, p - 1 - rank), p // 2, m // 2)
        numbers = [number for number, step in enumerate(steps, start=1) for _ in step]
        nearer = " (flow 0 is direction 1 here: it comes from the nearer end)" if rank >= p // 2 else ""
        return f", in step {numbers[place] if place < len(numbers) else 8}{nearer}"

    return programs.look_at_rows(dualpipe_rows(p, m), expected, COST, step) or programs.look_at_place(
        dualpipe_place(p, m), expected, "dualpipe_place(p, m)"
    )


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


def _judge_queue(fn: Callable[..., Any]) -> str:
    if report := on_ranks(_try_rows, 1, fn, case="running backward words")[0]:
        raise Wrong(report)
    return "every I's weight gradient waits for its own W, oldest first, on all ranks of DualPipe that were tried"


rows = Part(
    "dualpipe-6",
    "rows_dualpipe",
    "DualPipe's rows",
    "Write words, named, dualpipe_rows and dualpipe_place: the eight steps, as rows of stages and microbatches.",
    names=("words", "named", "dualpipe_rows", "dualpipe_place"),
    trials=(
        Alone(
            _look_at_words,
            ((0, 2, 4), (0, 4, 8), (1, 4, 8), (1, 4, 14), (0, 6, 12), (1, 8, 20), (3, 8, 32)),
            "words({}, {}, {})",
        ),
        Alone(_look_at_named, BY_HAND, "named({}, {})"),
        Alone(_look_at_rows, ((2, 4), (2, 6), (4, 8), (4, 14), (6, 12), (8, 20), (10, 24)), "dualpipe_rows({}, {})"),
    ),
    right="words of 7 positions, 8 rows named by hand, 7 sizes action by action; that of 8 ranks and 20 microbatches "
    "is DeepSeek's",
    minutes=75,
    points=5,
    hints=(
        "Print the page's table for rank 0 of 4 with 8 microbatches as words, and repeat what depends on the "
        "distances, inside = p // 2 - 1 - position, outside = position + 1. words is a sum of eight lists.",
        "named keeps a count of forwards and one of backwards for each flow, and a queue: an I appends the name of its "
        "W, a W takes the first. A pair is word.split('&'), its halves named one after the other.",
        "In dualpipe_rows position r has (r, 0) and (p - 1 - r, m // 2), as flows 0 and 1 in the upper half and the "
        "other way round in the lower one, with the words of min(r, p - 1 - r). "
        'Step 6 is (["B1", "B0"] * outside)[:outside] + (["I1", "I0"] * outside)[outside:].',
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
