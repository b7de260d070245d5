"""The checks of a compact program's work, and its wiring: which result is the input of which action.

In: the arrays of a `CompactProgram`.  Out: a `Wiring`, or `InvalidProgram` with the actions in question.
The rules are those of `dualpipe_lab.pp.validation`: complete, ordered, placed; deadlocks are found by the order of
execution.  Time O(actions), in numpy.
"""

from typing import TYPE_CHECKING, NamedTuple

from dualpipe_lab.pp.compact.arrays import IS_B, IS_F, IS_I, IS_W, Flags, Ints
from dualpipe_lab.pp.program import B, F, I, W
from dualpipe_lab.pp.validation.errors import InvalidProgram, ProblemList

if TYPE_CHECKING:
    from dualpipe_lab.pp.compact.action_arrays import ActionArrays

_FEW = 3  # actions that one problem names


class Wiring(NamedTuple):
    """Where the inputs come from and the results go to.

    Attributes:
        source: for each action, the action whose result is its input; the number of actions where it needs none.
        target: for each action, the rank that needs its result as a message; -1 where it needs none.
    """

    source: Ints
    target: Ints


def check_work(compact: "ActionArrays") -> Wiring:
    """Return the wiring of a program whose work is complete and in order on every rank; raise otherwise."""
    for check in (_check_ranks, _check_ranges, _check_pairs, _check_complete):
        _raise_if_any(compact, check(compact))
    cell = _cells(compact)
    made_by = [_places(compact, cell, kinds) for kinds in ((IS_F,), (IS_B, IS_I))]
    _raise_if_any(compact, [*_check_order(compact, cell, made_by), *_check_routes(compact, made_by[0])])
    return _wire(compact, cell, made_by)


def _raise_if_any(compact: "ActionArrays", problems: list[str]) -> None:
    found = ProblemList()
    for problem in problems:
        found.add(problem)
    if found.total:
        raise InvalidProgram(compact.name, found.listed, found.total)


def _cells(compact: "ActionArrays") -> Ints:
    """Return stage * num_microbatches + microbatch of each action."""
    import numpy as np

    return compact.stage.astype(np.int64) * compact.num_microbatches + compact.microbatch


def _places(compact: "ActionArrays", cell: Ints, kinds: tuple[int, ...]) -> Ints:
    """Return the action of one of these kinds for each cell; every cell must have exactly one."""
    import numpy as np

    actions = np.flatnonzero(np.isin(compact.kind, kinds))
    places = np.empty(compact.num_stages * compact.num_microbatches, np.int32)
    places[cell[actions]] = actions
    return places


def _check_ranks(compact: "ActionArrays") -> list[str]:
    import numpy as np

    if not compact.num_ranks:
        return ["it has no ranks; give it at least one row of actions"]
    empty = np.flatnonzero(np.diff(compact.offsets) == 0)
    return [f"rank {rank} has no actions; give it a stage or use fewer ranks" for rank in empty[:_FEW]]


def _check_ranges(compact: "ActionArrays") -> list[str]:
    import numpy as np

    problems = []
    for what, values, count in (
        ("kind", compact.kind, 4),
        ("stage", compact.stage, compact.num_stages),
        ("microbatch", compact.microbatch, compact.num_microbatches),
    ):
        for index in np.flatnonzero((values < 0) | (values >= count))[:_FEW]:
            where = "rank {}, position {}".format(*compact.locate(int(index)))
            problems.append(f"{where}: the action has {what} {values[index]}, out of range 0..{count - 1}")
    return problems


def _check_pairs(compact: "ActionArrays") -> list[str]:
    import numpy as np

    if not compact.has_pairs:
        return []
    second, before = np.flatnonzero(compact.second), np.flatnonzero(compact.second) - 1
    wrong = np.isin(second, compact.offsets) | (compact.kind[before] != IS_F)
    wrong |= ~np.isin(compact.kind[second], (IS_B, IS_I))
    return [
        "rank {}, position {}: {} must be the B or I of a pair, behind its F".format(
            *compact.locate(int(index)), compact.action(int(index))
        )
        for index in second[wrong][:_FEW]
    ]


def _check_complete(compact: "ActionArrays") -> list[str]:
    import numpy as np

    cell, num_cells = _cells(compact), compact.num_stages * compact.num_microbatches
    of = {kind: cell[compact.kind == number] for kind, number in ((F, IS_F), (B, IS_B), (I, IS_I), (W, IS_W))}
    every, backward = range(num_cells), np.concatenate([of[B], of[I]])
    problems = [*_miscounted(compact, F, of[F], every), *_miscounted(compact, "B or I", backward, every)]
    if not np.array_equal(np.sort(of[I]), np.sort(of[W])):
        for kind, other in ((I, W), (W, I)):
            for stage, microbatch in _divided(compact, np.setdiff1d(of[kind], of[other])):
                problems.append(f"stage {stage}, microbatch {microbatch}: {kind} without {other}; add it")
        problems += _repeated(compact, W, of[W])
    if not problems and not num_cells:
        problems.append("it has no work; give it stages and microbatches")
    return problems


def _miscounted(compact: "ActionArrays", what: str, found: Ints, every: range) -> list[str]:
    """Return the problems of cells that do not have exactly one action of a kind."""
    import numpy as np

    if len(found) == len(every) and (np.bincount(found, minlength=len(every)) == 1).all():
        return []
    present = np.unique(found)
    gaps = np.flatnonzero(present != np.arange(len(present)))  # the first cell that is missing lies before a gap
    missing = int(gaps[0]) if len(gaps) else len(present)
    problems = _repeated(compact, what, found)
    if missing < len(every):
        stage, microbatch = divmod(missing, compact.num_microbatches)
        lacking = len(every) - len(present)
        more = f" (and {lacking - 1} more)" if lacking > 1 else ""
        problems.append(f"stage {stage}, microbatch {microbatch}{more}: no {what}; every stage runs every microbatch")
    return problems


def _repeated(compact: "ActionArrays", what: str, found: Ints) -> list[str]:
    import numpy as np

    cells, counts = np.unique(found, return_counts=True)
    return [
        f"stage {stage}, microbatch {microbatch}: {what} runs again; keep one"
        for stage, microbatch in _divided(compact, cells[counts > 1])
    ]


def _divided(compact: "ActionArrays", cells: Ints) -> list[tuple[int, int]]:
    return [divmod(int(cell), compact.num_microbatches) for cell in cells[:_FEW]]


def _check_order(compact: "ActionArrays", cell: Ints, made_by: list[Ints]) -> list[str]:
    """Check that F comes before B or I, and I before W, on one rank and not in one pair."""
    import numpy as np

    forward, backward = made_by
    problems = []
    for kinds, early_of in (((IS_B, IS_I), forward), ((IS_W,), backward)):
        late = np.flatnonzero(np.isin(compact.kind, kinds))
        early = early_of[cell[late]]
        wrong = (early >= late) | (compact.rank[early] != compact.rank[late])
        wrong |= compact.second[late] & (early == late - 1)
        for one, other in zip(early[wrong][:_FEW], late[wrong][:_FEW], strict=True):
            here, there = compact.locate(int(one)), compact.locate(int(other))
            problems.append(
                f"{compact.action(int(other))} (rank {there[0]}, position {there[1]}) needs {compact.action(int(one))} "
                f"(rank {here[0]}, position {here[1]}) in an earlier step of its rank; move it there"
            )
    return problems


def _check_routes(compact: "ActionArrays", forward: Ints) -> list[str]:
    import numpy as np

    if compact.num_directions is None:
        return []
    homes = compact.rank[forward].reshape(compact.num_stages, compact.num_microbatches)
    if compact.num_directions and (homes == homes[:, :1]).all():
        return []
    taken = np.unique(homes, axis=1).shape[1]
    if taken <= compact.num_directions:
        return []
    return [
        f"its microbatches take {taken} routes through the ranks, num_directions={compact.num_directions} allows "
        f"{compact.num_directions}; state num_directions={taken}, or keep each stage on one rank"
    ]


def _wire(compact: "ActionArrays", cell: Ints, made_by: list[Ints]) -> Wiring:
    """Find the source of each input, and the rank of each message; rules 2 and 3 of the simulator."""
    import numpy as np

    forward, backward = made_by
    is_forward, last = compact.kind == IS_F, compact.num_stages - 1
    is_backward = ~is_forward & (compact.kind != IS_W)
    source = np.full(compact.num_actions, compact.num_actions, np.int32)
    target = np.full(compact.num_actions, -1, np.int32)
    row = compact.num_microbatches  # cells from a stage to the next
    for flow, results, away in ((is_forward, forward, row), (is_backward, backward, -row)):
        has_before, has_after = _neighbours(compact.stage, flow, away > 0, last)
        source[has_before] = results[cell[has_before] - away]
        target[has_after] = compact.rank[forward[cell[has_after] + away]]
    target[target == compact.rank] = -1  # on one rank there is no message
    return Wiring(source, target)


def _neighbours(stage: Ints, flow: Flags, downwards: bool, last: int) -> tuple[Ints, Ints]:
    """Return the actions of a flow with a stage before theirs, and those with a stage after it, in its direction."""
    import numpy as np

    first, final = (0, last) if downwards else (last, 0)
    return np.flatnonzero(flow & (stage != first)), np.flatnonzero(flow & (stage != final))
