"""What an operator sees of a training run, and in what two runs differ: losses, norms, bytes, time, memory, copies.

Chapter: book/whole/museum.  In: the log of a sound run and of a suspect.  Out: the symptoms of the suspect.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isclose

FIRST_LOSS = "the first loss is another"
CURVE = "later losses are others"
NORM = "the first gradient norm is another"
TWINS = "the data ranks report equal losses"
COPIES = "copies of a weight differ"
BYTES = "a step sends other bytes"
TIME = "a step takes another time"
MEMORY = "the peak of gathered weights is another"

_EQUAL = 1e-6  # relative: digits that a log shows; runs whose order of sums differs agree to 1e-13


@dataclass
class RankLog:
    """What one rank writes down of a run.

    Attributes:
        losses: of every step, the mean over the targets of all ranks.
        own_losses: of every step, this rank's summand.
        norms: of the full gradient, before clipping.
        sent: bytes that this rank sent in every step.
        times: of every step, in milliseconds of the virtual clock.
        spread: the largest difference between copies of one weight, after the last step.
        peak: the most bytes of gathered weights at any time; 0 where nothing is gathered.
    """

    losses: list[float] = field(default_factory=list)
    own_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    spread: float = 0.0
    peak: int = 0


@dataclass
class Log:
    """The logs of all ranks of a run; the curves are those of rank 0."""

    ranks: Sequence[RankLog]

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return self.ranks[0].losses

    @property
    def norms(self) -> list[float]:
        """The gradient norm of every step."""
        return self.ranks[0].norms

    @property
    def sent(self) -> int:
        """Bytes that rank 0 sent in its first step."""
        return self.ranks[0].sent[0]

    @property
    def time(self) -> float:
        """Milliseconds of rank 0's first step."""
        return self.ranks[0].times[0]

    @property
    def peak(self) -> int:
        """The most bytes of gathered weights on a rank."""
        return max(rank.peak for rank in self.ranks)

    @property
    def spread(self) -> float:
        """The largest difference between copies of one weight."""
        return max(rank.spread for rank in self.ranks)

    @property
    def are_twins(self) -> bool:
        """Whether two ranks reported the same summand in every step."""
        first, *others = self.ranks
        return any(rank.own_losses == first.own_losses for rank in others)


def symptoms(sound: Log, suspect: Log) -> set[str]:
    """Return in what a run differs from a sound run of the same model, data and ranks.

    >>> log = Log([RankLog([2.0, 1.0], [2.0, 1.0], [3.0, 2.0], [8, 8], [5.0, 5.0])])
    >>> other = Log([RankLog([2.0, 1.5], [2.0, 1.5], [6.0, 2.0], [16, 16], [5.0, 5.0])])
    >>> sorted(symptoms(log, other))
    ['a step sends other bytes', 'later losses are others', 'the first gradient norm is another']
    """
    mine, theirs = suspect.ranks[0], sound.ranks[0]
    differs = {
        FIRST_LOSS: not _equal(mine.losses[:1], theirs.losses[:1]),
        CURVE: not _equal(mine.losses[1:], theirs.losses[1:]),
        NORM: not _equal(mine.norms[:1], theirs.norms[:1]),
        TWINS: suspect.are_twins and not sound.are_twins,
        COPIES: suspect.spread > 0 and sound.spread == 0,
        BYTES: suspect.sent != sound.sent,
        TIME: suspect.time != sound.time,
        MEMORY: suspect.peak != sound.peak,
    }
    return {name for name, is_so in differs.items() if is_so}


def beside(sound: Log, suspect: Log, steps: int = 4) -> str:
    """Return a table of what both runs wrote down: curves of the first steps, then single numbers.

    >>> log = Log([RankLog([2.0], [2.0], [3.0], [8], [5.0])])
    >>> print(beside(log, log))
                          sound   suspect
    loss                 2.0000    2.0000
    gradient norm        3.0000    3.0000
    sum of rank 0        2.0000    2.0000
    bytes sent, step 1        8         8
    ms, step 1            5.000     5.000
    """
    rows = [("", ["sound"], ["suspect"])]
    pairs = [(log.ranks[0], [log.ranks[rank].own_losses for rank in range(len(log.ranks))]) for log in (sound, suspect)]
    curves = {
        "loss": [log.losses for log, _ in pairs],
        "gradient norm": [log.norms for log, _ in pairs],
    }
    for rank in range(len(sound.ranks)):
        curves[f"sum of rank {rank}"] = [summands[rank] for _, summands in pairs]
    for name, (mine, theirs) in curves.items():
        rows.append((name, [_digits(x) for x in mine[:steps]], [_digits(x) for x in theirs[:steps]]))
    rows.append(("bytes sent, step 1", [f"{sound.sent:,}"], [f"{suspect.sent:,}"]))
    rows.append(("ms, step 1", [f"{sound.time:.3f}"], [f"{suspect.time:.3f}"]))
    if sound.peak:
        rows.append(("peak of weights, bytes", [f"{sound.peak:,}"], [f"{suspect.peak:,}"]))
    if max(sound.spread, suspect.spread) > 0:
        rows.append(("copies differ by", [f"{sound.spread:.2g}"], [f"{suspect.spread:.2g}"]))
    texts = [(name, " ".join(left), " ".join(right)) for name, left, right in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(3)]
    lines = [f"{n:{widths[0]}}   {a:>{widths[1]}}   {b:>{widths[2]}}" for n, a, b in texts]
    return "\n".join(line.rstrip() for line in lines)


def _digits(value: float) -> str:
    return f"{value:.4f}" if value < 1000 else f"{value:.0f}"


def _equal(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(isclose(a, b, rel_tol=_EQUAL) for a, b in zip(some, others, strict=True))
