"""DualPipe's rows: eight steps, by the distance to either end."""

from collections import deque
from collections.abc import Sequence

from .row_messages import Place


def words(position: int, p: int, m: int) -> list[str]:
    """The words of a position below p / 2: work of flow 0, from the outside, and of flow 1, from the middle."""
    inside, outside = p // 2 - 1 - position, position + 1
    steady = m // 2 - p + outside
    found = ["F0"] * 2 * inside + ["F0", "F1"] * outside + ["I1", "W", "F1"] * inside
    found += ["F0&B1"] if inside else ["F0", "B1"]
    found += ["F1&B0"] + ["F0&B1", "F1&B0"] * (steady - 1) + ["B1", "F1&B0"] * inside
    found += (["B1", "B0"] * outside)[:outside] + (["I1", "I0"] * outside)[outside:]
    return found + ["W", "I0"] * inside + ["W"] * outside


def named(found: Sequence[str], flows: tuple[tuple[int, int], tuple[int, int]]) -> str:
    """The words as a row: each flow is a stage and its first microbatch."""
    forwards, backwards = [0, 0], [0, 0]
    waiting: deque[str] = deque()

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

    return " ".join(
        f"({';'.join(map(name, word.split('&')))})OVERLAP_F_B" if "&" in word else name(word) for word in found
    )


def dualpipe_rows(p: int, m: int) -> list[str]:
    """One row for each of p positions; the first m / 2 microbatches start at stage 0 of position 0."""
    rows = []
    for position in range(p):
        down, up = (position, 0), (p - 1 - position, m // 2)
        flows = (down, up) if position < p // 2 else (up, down)  # flow 0 is that of the nearer end
        rows.append(named(words(min(position, p - 1 - position), p, m), flows))
    return rows


def dualpipe_place(p: int, m: int) -> Place:
    """Where a stage runs for a microbatch."""
    return lambda stage, i: stage if i < m // 2 else p - 1 - stage
