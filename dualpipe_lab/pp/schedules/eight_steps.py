"""DualPipe's eight steps: the work of one rank on two flows of microbatches, from its first forward to its last W.

Chapter: book/pp/dualpipe.  In: the rank's position, the number of microbatches per flow.  Out: its steps.
Two flows of n microbatches cross H ranks: flow 0 comes from the outside, position 0, and flow 1 from the middle,
position H - 1.  The words name work by flow: F0 is the next forward of flow 0, F1&B0 an overlapped pair, W the oldest
pending weight gradient of either flow.  All counts follow from the rank's distance to either end.
  live activations   2 * H + 1 at every position
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1, figure 5; the numbering of the steps is DeepSeek's own, in
their public implementation (github.com/deepseek-ai/DualPipe).
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from dualpipe_lab.pp.program import Action, F, I, Overlap, ProgramStep, W


class Flow(NamedTuple):
    """The microbatches that reach a rank from one side, and the stage that runs them there."""

    stage: int
    first_microbatch: int


def eight_steps(position: int, num_positions: int, num_microbatches: int) -> list[list[str]]:
    """Return the eight steps of one rank, each a list of words such as F0, I1, W and F1&B0.

    `num_positions` is the number of ranks from the outside to the middle; `num_microbatches` is the number of one flow,
    at least 2 * num_positions.

    >>> for number, words in enumerate(eight_steps(position=0, num_positions=2, num_microbatches=4), start=1):
    ...     print(number, *words)
    1 F0 F0
    2 F0 F1
    3 I1 W F1
    4 F0&B1 F1&B0
    5 B1 F1&B0
    6 B1 I0
    7 W I0
    8 W
    """
    inside = num_positions - position - 1  # the ranks between this one and the middle
    outside = position + 1  # this rank and those between it and the end
    steady = num_microbatches - 2 * num_positions + outside
    # The middle rank has had no time to prepare a backward: it makes its first pair's halves one after the other.
    first_pair = ["F0&B1"] if inside else ["F0", "B1"]
    return [
        ["F0"] * 2 * inside,
        ["F0", "F1"] * outside,
        ["I1", "W", "F1"] * inside,
        [*first_pair, "F1&B0", *["F0&B1", "F1&B0"] * (steady - 1)],
        ["B1", "F1&B0"] * inside,
        (["B1", "B0"] * outside)[:outside] + (["I1", "I0"] * outside)[outside:],
        ["W", "I0"] * inside,
        ["W"] * outside,
    ]


def steps_of(flows: tuple[Flow, Flow], position: int, num_positions: int, num_microbatches: int) -> list[ProgramStep]:
    """Return the eight steps as actions on stages and microbatches, numbered in the order of each flow."""
    names = _Names(flows)
    words = eight_steps(position, num_positions, num_microbatches)
    return [step for number in words for word in number for step in names.steps(word)]


class _Names:
    """Translates the words of one rank into actions on stages and microbatches, in order."""

    def __init__(self, flows: tuple[Flow, Flow]) -> None:
        self.flows = flows
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.waiting: deque[Action] = deque()  # weight gradients that an I has left

    def steps(self, word: str) -> Iterator[ProgramStep]:
        forward, _, backward = word.partition("&")
        if backward:
            yield Overlap(self.action(forward), self.action(backward))
        elif word == W:
            yield self.waiting.popleft()
        else:
            yield self.action(word)

    def action(self, word: str) -> Action:
        kind, flow = word[0], int(word[1])
        done = self.forwards if kind == F else self.backwards
        stage, first = self.flows[flow]
        action = Action(stage, kind, first + done[flow])
        done[flow] += 1
        if kind == I:
            self.waiting.append(action._replace(kind=W))
        return action
