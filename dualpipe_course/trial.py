"""Trying an answer: the learner's function on fresh ranks, and its accidents in words.

Every function runs in processes of its own, also where one would do: an endless loop then ends with the time limit,
and nothing that the function breaks outlives it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from dualpipe_course.plain import plain
from dualpipe_course.wrong import OutOfTime, Wrong
from dualpipe_lab.launch import operating_system

if TYPE_CHECKING:
    from dualpipe_lab.launch.launcher import Results

Case = TypeVar("Case")
Slips: TypeAlias = Mapping[int, str] | Mapping[float, str]  # wrong numbers, each with what went wrong
SECONDS = 20.0
TODO = "your code"  # what a starter raises


def on_ranks(
    harness: Callable[..., Any], world_size: int, *args: Any, case: str, seconds: float = SECONDS, **options: Any
) -> "Results":
    """Launch `harness(rank, world_size, *args)`; an error of the learner's function becomes a `Wrong`."""
    __tracebackhide__ = True
    from dualpipe_lab.launch.launcher import launch
    from dualpipe_lab.launch.supervise.errors import RankError, RankTimeout

    try:
        return launch(harness, world_size, *args, timeout=seconds, **options)
    except RankError as error:
        failure = next(iter(error.failures.values()))
        if TODO in failure.cause and "NotImplementedError" in failure.cause:
            raise Wrong("not written yet: replace the line that raises NotImplementedError") from None
        raise Wrong(ended(case, failure.cause, f"rank {failure.rank}", failure.where, error.notes)) from None
    except RankTimeout as error:
        kind = OutOfTime if error.seconds > seconds else Wrong  # a deadlock ends earlier, and says what to mend
        raise kind("\n  ".join([f"{case}: {error.headline}", *error.report])) from None
    except TypeError as error:
        raise Wrong(f"{case}: {error}") from None


def ended(case: str, cause: str, who: str = "your function", where: str = "", notes: Sequence[str] = ()) -> str:
    """How a function ended that did not return: `cause` is what it did, as failures and `call_each` say it.

    >>> ended("2 ranks", "died without an exception (SIGABRT)", "rank 1")
    '2 ranks: rank 1 died without an exception (SIGABRT)'
    """
    place = [f"at {where}"] if where else []
    known = [note for note in notes if note.startswith("collective mismatch")]
    return "\n  ".join([f"{case}: {who} {cause}", *place, *known])


def call_each(fn: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> list[tuple[bool, Any]]:
    """Call a pure function with each case in one fresh process: (True, value) or (False, `raised ...`)."""
    needs_function(fn)
    results: list[tuple[bool, Any]]
    if operating_system.in_browser():  # a page's worker is the fresh process, and the page ends it
        results = _call_each(0, 1, fn, list(cases))
    else:
        results = on_ranks(_call_each, 1, fn, list(cases), case="calling your function")[0]
    if any(not fine and TODO in str(value) for fine, value in results):
        raise Wrong("not written yet: replace the line that raises NotImplementedError")
    return results


def _call_each(
    rank: int, world_size: int, fn: Callable[..., Any], cases: list[tuple[Any, ...]]
) -> list[tuple[bool, Any]]:
    results: list[tuple[bool, Any]] = []
    for case in cases:
        try:
            results.append((True, fn(*case)))
        except Exception as error:
            results.append((False, f"raised {type(error).__name__}: {error}"))
    return results


def needs_function(answer: object) -> None:
    """Raise `Wrong` unless the answer can be called."""
    if not callable(answer):
        raise Wrong(f"this check takes a function, got {type(answer).__name__}; pass the function itself, uncalled")


def needs_ints(answer: object, names: tuple[str, ...], slips: Sequence[Slips] = ()) -> list[int]:
    """Return the answer as plain integers; raise `Wrong` for anything else, such as an object equal to everything.

    A fraction that is a key of its number's `slips`, rounded to a tenth or finer, gets their words.
    """
    found = plain(answer)
    values: list[Any] = found if isinstance(found, list) else [found]
    if len(values) != len(names):
        raise Wrong(f"this check takes {len(names)} whole numbers ({', '.join(names)}), got {len(values)}")
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        if value is ...:
            raise Wrong(f"not answered yet: put your number in place of the dots ({name})")
        if type(value) is not int:
            is_number = type(value) in (float, Fraction)
            text = f"{float(value):.10g}" if is_number else type(value).__name__
            known = slips[place].items() if slips and is_number else ()
            if words := next((words for key, words in known if key % 1 and abs(value - key) <= 0.05), ""):
                raise Wrong(f"{name}, {text}: {words}")
            raise Wrong(f"{name} must be a whole number, got {text}; write it as 42, without a unit")
    return [int(value) for value in values]


def partial_score(found: float | Fraction, start: float | Fraction, best: float | Fraction) -> float:
    """The score of a legal answer that is worse than the best: 0 at `start` and beyond, towards 0.9 near `best`.

    >>> partial_score(30, start=40, best=20)
    0.45
    """
    return round(0.9 * float(max(start - found, 0) / (start - best)), 2)


def smallest_failing(case: Case, fails: Callable[[Case], bool], smaller: Callable[[Case], Iterator[Case]]) -> Case:
    """Shrink a failing case: as long as a smaller one fails too, go on with that.

    >>> smallest_failing(40, lambda n: n > 12, lambda n: iter([n // 2, n - 1]))
    13
    """
    while (found := next((other for other in smaller(case) if fails(other)), None)) is not None:
        case = found
    return case
