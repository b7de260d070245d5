"""Judging a queue of weight gradients: after every word of a rank's backward, what has been added to which gradient.

Chapter: book/pp/dualpipe.  In: the learner's function.  Out: what is wrong after the shortest beginning of a row of
words after which anything is, or an empty string.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.differences import TOLERANCE
from dualpipe_lab.pp.program import B, F, I, W
from dualpipe_lab.pp.schedules.eight_steps import eight_steps

if TYPE_CHECKING:
    from torch import Tensor

Words = Sequence[str]
SMALL = ("B0", "I0 W", "I0 I0 W W", "I1 I0 W W", "I0 B1 W", "I0 I1 B0 W B1 I0 W W")


def rows() -> Iterator[list[str]]:
    """Yield rows of words to try: small ones, then the backward words of DualPipe's ranks."""
    yield from (words.split() for words in SMALL)
    for position, num_positions, per_flow in ((0, 1, 2), (0, 2, 4), (1, 2, 4), (0, 4, 8), (2, 4, 10), (3, 4, 10)):
        steps = eight_steps(position, num_positions, per_flow)
        parts = [part for step in steps for word in step for part in word.split("&")]
        yield [part for part in parts if part[0] != F]


def try_rows(rank: int, world_size: int, fn: Callable[..., Any]) -> str:
    """Run the learner's function on every beginning of every row; say what is wrong first."""
    for words in rows():
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
        if not _close(dx.flatten().tolist(), (dys[flow][i] @ weights[flow]).flatten().tolist()):
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
