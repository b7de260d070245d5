"""DualPipe's rows: eight steps, by the distance to either end."""

from collections import deque
from collections.abc import Sequence

from .row_messages import Place


def words(position: int, p: int, m: int) -> list[str]:
    """The words of a position below p / 2: work of flow 0, from the outside, and of flow 1, from the middle."""
    inside = p // 2 - 1 - position  # positions between this one and the middle
    outside = position + 1  # this one and those between it and its end
    rounds = m // 2 - p + outside
    ends = ["B1", "B0"] * outside
    late = ["I1", "I0"] * outside  # at the end others wait for I, and W can wait
    steps = [
        ["F0", "F0"] * inside,
        ["F0", "F1"] * outside,
        ["I1", "W", "F1"] * inside,
        # In the middle no backward was prepared for the first pair: its halves run one after the other.
        (["F0&B1"] if inside else ["F0", "B1"]) + ["F1&B0"] + ["F0&B1", "F1&B0"] * (rounds - 1),
        ["B1", "F1&B0"] * inside,
        ends[:outside] + late[outside:],
        ["W", "I0"] * inside,
        ["W"] * outside,
    ]
    return [word for step in steps for word in step]


def named(words: Sequence[str], flows: tuple[tuple[int, int], tuple[int, int]]) -> str:
    """The words as a row: each flow is a stage and its first microbatch."""
    forwards, backwards = [0, 0], [0, 0]  # how many each flow has had
    waiting: deque[str] = deque()  # a W for each I, the oldest first

    def name(word: str) -> str:
        if word == "W":
            return waiting.popleft()
        kind, flow = word[0], int(word[1])
        counts, (stage, first) = forwards if kind == "F" else backwards, flows[flow]
        i = first + counts[flow]
        counts[flow] += 1
        if kind == "I":
            waiting.append(f"{stage}W{i}")
        return f"{stage}{kind}{i}"

    row = []
    for word in words:
        halves = [name(half) for half in word.split("&")]
        row.append(halves[0] if len(halves) == 1 else f"({halves[0]};{halves[1]})OVERLAP_F_B")
    return " ".join(row)


def dualpipe_rows(p: int, m: int) -> list[str]:
    """One row for each of p positions; the first m / 2 microbatches start at stage 0 of position 0."""
    rows = []
    for position in range(p):
        down, up = (position, 0), (p - 1 - position, m // 2)
        flows = (down, up) if position < p // 2 else (up, down)  # flow 0 is that of the nearer end
        rows.append(named(words(min(position, p - 1 - position), p, m), flows))
    return rows


def dualpipe_place(p: int, m: int) -> Place:
    """A function of stage and microbatch: the position that runs it."""
    return lambda stage, i: stage if i < m // 2 else p - 1 - stage
