"""An answer on ranks beside one process: values by name, bytes and messages, live tensors, model time.

In: a harness, which runs on every rank and returns a `Found`.  Out: nothing, or `Wrong` with the first difference.
  on a rank         `Numbers.of` makes a tensor plain, a `Meter` counts what was sent and how long it took,
                    `MemoryMeter` what stays alive, `Unchanged` notices an argument that was written to
  one process       its values come with the rank's own, or from `beside`, which runs after the ranks have
  then              the first name that differs on any rank, and the first `Limit` that is broken, become a sentence
The words are the check's own: `why` is given the difference, a `Limit` has its sentence.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dualpipe_course.differences import TOLERANCE, Difference, apart, difference
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong
from dualpipe_lab.launch.causes import Compared, cause, times

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe_lab.launch.launcher import Results


class Numbers(NamedTuple):
    """A tensor as plain data: its shape, and its numbers row by row."""

    shape: tuple[int, ...]
    flat: list[float]

    def row(self, index: int) -> list[float]:
        """The numbers of one row of the first dimension.

        >>> Numbers((2, 3), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).row(1)
        [4.0, 5.0, 6.0]
        """
        size = prod(self.shape[1:])
        return self.flat[index * size : (index + 1) * size]

    def equals(self, other: "Numbers | None", tolerance: float = TOLERANCE) -> bool:
        """Whether another tensor has the same shape and, but for rounding, the same numbers."""
        if other is None or other.shape != self.shape:
            return False
        return difference(self.flat, other.flat, tolerance) is None

    @classmethod
    def of(cls, value: object) -> "Numbers | None":
        """A tensor, or nested lists, in plain numbers; None for anything else."""
        import torch

        if isinstance(value, list):
            value = torch.tensor(value, dtype=torch.float64)

        if not isinstance(value, torch.Tensor):
            return None
        return cls(tuple(value.shape), value.detach().flatten().tolist())


Values = Mapping[str, Numbers | None]  # None: missing


class Found(NamedTuple):
    """What one rank has after the answer has run.

    Attributes:
        values: by name, in the order in which they are compared.
        expected: those of one process, unless `compare_on_ranks` gets them from `beside`.
        slips: by name, what typical mistakes make of the value, under the words for them.
        costs: what it took, by a name that a `Limit` has.
        refused: why there is nothing to compare, in words; an empty string if there is.
        changed: what is wrong although all values are right.
    """

    values: Values
    expected: Mapping[str, Numbers | None] = {}
    slips: Mapping[str, Mapping[str, Numbers | None]] = {}
    costs: Mapping[str, float] = {}
    refused: str = ""
    changed: str = ""


class Off(NamedTuple):
    """The first value that differs from that of one process.

    Attributes:
        rank: where it was found.
        name: of the value.
        found: what is there, or None.
        expected: what one process has.
        by_rank: the same value on all ranks.
        copies: those of the ranks that are to have the same numbers as this one.
        slip: words for a typical mistake that gives what was found, or an empty string.
        difference: between the numbers; None where one is missing or shapes differ.
    """

    rank: int
    name: str
    found: Numbers | None
    expected: Numbers
    by_rank: Sequence[Numbers | None]
    copies: Sequence[Numbers | None] = ()
    slip: str = ""
    difference: Difference | None = None

    @property
    def place(self) -> int:
        """The first number that is off; 0 where there is none to compare."""
        return 0 if self.difference is None else self.difference.place

    @property
    def ratio(self) -> float | None:
        """By which factor all numbers are off, if by one."""
        return None if self.difference is None else self.difference.ratio

    @property
    def has_other_shape(self) -> bool:
        """Whether there is something, of another shape."""
        return self.found is not None and self.found.shape != self.expected.shape

    @property
    def compared(self) -> Compared:
        """The numbers as the table of causes takes them."""
        assert self.found is not None, "nothing to compare"
        rows = [value.flat for value in self.copies if value is not None and value.shape == self.expected.shape]
        copies = rows if len(rows) == len(self.copies) else []
        return Compared(self.found.flat, self.expected.flat, copies, len(self.by_rank), self.expected.shape)


class Limit(NamedTuple):
    """How much something may cost.

    Attributes:
        of: a name of `Found.costs`, or what the ledger counts: `bytes`, `calls`, or those `of` an operation, such as
            `calls of all_reduce`.
        most: what is allowed; a list has a number for every rank.
        words: the sentence if it is broken, in which {rank}, {found} and {most} stand for the values.
        least: what is needed; as much as `most` where only one number is right.
        scope: of all ranks together, of the rank that has most, or of every rank by itself.
        shows: whether the sentence comes with a picture of the run.
    """

    of: str
    most: float | Sequence[float]
    words: str
    least: float | Sequence[float] = 0
    scope: Literal["sum", "largest", "each"] = "sum"
    shows: bool = False


def compare_on_ranks(
    harness: Callable[..., Found],
    num_ranks: int,
    *args: Any,
    case: str,
    beside: Callable[[], Sequence[Values]] | None = None,
    why: Callable[[Off], str] | None = None,
    limits: Sequence[Limit] = (),
    tolerance: float = TOLERANCE,
    at: str = ": rank {rank}: ",
    **options: Any,
) -> "Results":
    """Launch `harness(rank, world_size, *args)` and compare what every rank found with one process.

    Args:
        harness: calls the answer, which is among `args`, and returns a `Found`.
        num_ranks: how many ranks there are.
        args: for the harness.
        case: the case, in words.
        beside: returns the expected values by rank, called when the ranks are done; by default the ranks know them.
        why: what is wrong with a value, in words (default: `in_words`).
        limits: what it may cost.
        tolerance: the error that is allowed, relative to the largest number (default: float64's rounding; 0: none).
        at: between the case and what is wrong with a value.
        options: of the launch, such as `clock` and `link`.

    Raises:
        Wrong: the answer failed, a value differs, an argument has changed, or a limit is broken.
    """
    results = on_ranks(harness, num_ranks, *args, case=case, **options)
    check_found(results, case, beside, why, tolerance, at)
    for limit in limits:
        check_limit(results, limit, case)
    return results


def check_found(
    results: Sequence[Found],
    case: str,
    beside: Callable[[], Sequence[Values]] | None = None,
    why: Callable[[Off], str] | None = None,
    tolerance: float = TOLERANCE,
    at: str = ": rank {rank}: ",
) -> None:
    """Raise `Wrong` unless all ranks have what one process has; arguments as for `compare_on_ranks`."""
    for rank, found in enumerate(results):
        if found.refused:
            raise Wrong(f"{case}: rank {rank}: {found.refused}")
    expected = [found.expected for found in results] if beside is None else beside()
    if (off := first_off(results, expected, tolerance)) is not None:
        raise Wrong(f"{case}{at.format(rank=off.rank)}{(why or in_words)(off)}")
    for rank, found in enumerate(results):
        if found.changed:
            raise Wrong(f"{case}: rank {rank}: {found.changed}")


def first_off(results: Sequence[Found], expected: Sequence[Values], tolerance: float = TOLERANCE) -> Off | None:
    """The first value that differs: name by name, and for each name rank by rank; None if all are right.

    >>> three = Found({"y": Numbers((1,), [3.0])})
    >>> off = first_off([three, three], [{"y": Numbers((1,), [3.0])}, {"y": Numbers((1,), [1.0])}])
    >>> off.rank, off.name, off.ratio
    (1, 'y', 3.0)
    """
    for name in expected[0]:
        by_rank = [found.values.get(name) for found in results]
        for rank, (ours, known) in enumerate(zip(by_rank, expected, strict=True)):
            theirs = known[name]
            if theirs is None or (off := _off(ours, theirs, tolerance)) is None:
                continue
            slips = results[rank].slips.get(name, {})
            like = [words for words, value in slips.items() if ours and ours.equals(value, tolerance)]
            copies = [value for value, other in zip(by_rank, expected, strict=True) if other[name] == theirs]
            return off._replace(rank=rank, name=name, by_rank=by_rank, copies=copies, slip=like[0] if like else "")
    return None


def _off(ours: Numbers | None, theirs: Numbers, tolerance: float) -> Off | None:
    off = Off(0, "", ours, theirs, ())
    if ours is None or ours.shape != theirs.shape:
        return off
    differs = difference(ours.flat, theirs.flat, tolerance)
    return None if differs is None else off._replace(difference=differs)


def in_words(off: Off) -> str:
    """Say how a value differs from that of one process.

    >>> one = Numbers((2,), [1.0, 2.0])
    >>> in_words(Off(0, "dx", Numbers((2,), [2.0, 4.0]), one, [one], difference=Difference(2.0, 1e-12, 0, 2.0)))
    'dx is 2 times that of one process: it was added twice'
    """
    if off.found is None:
        return f"{off.name} is missing"
    if off.has_other_shape:
        return f"{off.name} has shape {list(off.found.shape)}, this rank's is {list(off.expected.shape)}"
    if off.slip:
        return f"{off.name}: {off.slip}"
    if multiple := off.difference and times(off.compared):
        return f"{off.name} is {multiple[0]} times that of one process{multiple[1]}"
    both = apart(off.found.flat[off.place], off.expected.flat[off.place], off.difference and off.difference.allowed)
    known = off.difference and not both.why and cause(off.compared, is_sure=True)
    return f"{off.name} differs from one process: number {off.place} {both}{f'; {known}' if known else ''}"


def check_limit(results: "Results", limit: Limit, case: str) -> None:
    """Raise `Wrong` if a limit is broken."""
    ranks: list[int | None] = [None] if limit.scope == "sum" else list(range(len(results)))
    spent = [(_spent(results, limit.of, rank), rank) for rank in ranks]
    if limit.scope == "largest":
        spent = [max(spent, key=lambda pair: pair[0])]
    for found, rank in spent:
        least, most = (of[rank or 0] if isinstance(of, Sequence) else of for of in (limit.least, limit.most))
        if not least <= found <= most:
            words = limit.words.format(rank=rank, found=found, most=most)
            raise Wrong(f"{case}: {words}", picture=results.timeline if limit.shows else None)


def _spent(results: "Results", of: str, rank: int | None) -> float:
    what, _, operation = of.partition(" of ")
    if what == "bytes":
        return results.ledger.sent(operation or None, rank)
    if what == "calls":
        return results.ledger.count(operation or None, rank)
    by_rank: list[float] = [found.costs[of] for found in results]
    return sum(by_rank) if rank is None else by_rank[rank]


def other_dtype(given: "Tensor", *results: object) -> str:
    """Say which result has another dtype than the tensors that were given; an empty string if none has."""
    found = [value.dtype for value in results if isinstance(value, type(given)) and value.dtype != given.dtype]
    return f"a result is {found[0]}, and the tensors that were given are {given.dtype}" if found else ""


def on_one_process(reference: Callable[..., Any], *args: Any) -> Any:
    """What `reference(rank, world_size, *args)` returns on one process of its own."""
    return on_ranks(reference, 1, *args, case="the reference")[0]


class Unchanged:
    """Tensors by name as they are now, which a learner's function must leave so: others may need them still."""

    def __init__(self, **tensors: "Tensor") -> None:
        self._pairs = {name: (tensor, tensor.detach().clone()) for name, tensor in tensors.items()}

    def first(self) -> str | None:
        """The name of the first one that has changed, if any has."""
        return next((name for name, (tensor, old) in self._pairs.items() if not tensor.detach().equal(old)), None)

    def check(self) -> None:
        """Raise if one of them has changed.

        Raises:
            RuntimeError: with the name of the tensor.
        """
        if (changed := self.first()) is not None:
            raise RuntimeError(f"the argument {changed} has changed; leave it as it is and work on a copy")
