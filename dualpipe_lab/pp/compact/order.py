"""The order of execution of a compact program: found once, as waves where the program is wide.

In: the arrays of a `CompactProgram` and the source of every input.  Out: an `Execution`, or `InvalidProgram` with the
cycle of waits.
  in turn    each rank runs until an input is missing; plain Python, for programs that are small or narrow
  waves      in each wave, every rank whose next step has its inputs runs this step; numpy, one operation for all ranks
Both take O(actions) time; a program has as many waves as steps on its longest path.  In turn, an action takes about 150
bytes; in waves, 60.
"""

from typing import TYPE_CHECKING, NamedTuple

from dualpipe_lab.pp.compact.arrays import IS_F, Flags, Ints
from dualpipe_lab.pp.validation.errors import InvalidProgram

if TYPE_CHECKING:
    from dualpipe_lab.pp.compact.action_arrays import ActionArrays

_WIDE, _LARGE = 128, 2**17  # ranks, actions: below either, numpy's cost per operation is more than what it saves


class Wave(NamedTuple):
    """A stretch of the order whose steps do not wait for each other: one step per rank at most.

    The steps' first actions are those from `start` to `middle`; those of pairs come last among them, in the order of
    the pairs' second actions, which are those from `middle` to `end`.
    """

    start: int
    middle: int
    end: int


class Execution(NamedTuple):
    """An order in which all actions can run.

    Attributes:
        actions: the actions in this order; without waves, the second of a pair follows its first.
        waves: the waves of this order, or None.
    """

    actions: Ints
    waves: list[Wave] | None


def find_execution(compact: "ActionArrays", source: Ints, wide: bool | None = None) -> Execution:
    """Return an order of execution; `wide`: whether to look for waves (default: if that is faster)."""
    if wide is None:
        wide = compact.num_ranks >= _WIDE and compact.num_actions >= _LARGE
    return _in_waves(compact, source) if wide else _in_turn(compact, source)


def merge_pairs(source: Ints, second: Flags, nothing: int) -> tuple[Ints, Ints]:
    """Return two sources of each action: a pair's first has both of the pair, its second, right behind it, has none.

    `nothing`: the source of an action that needs no input.
    """
    import numpy as np

    source, other = source.copy(), np.full_like(source, nothing)
    other[:-1][second[1:]] = source[second]
    source[second] = nothing
    return source, other


def _in_turn(compact: "ActionArrays", source: Ints) -> Execution:
    import numpy as np

    num = compact.num_actions
    sources, others = (array.tolist() for array in merge_pairs(source, compact.second, num))
    position, ends = compact.offsets[:-1].tolist(), compact.offsets[1:].tolist()
    done = [False] * num + [True]  # the last: no input needed
    waiting: dict[int, int] = {}  # action -> rank that needs its result
    order: list[int] = []
    runnable = list(range(compact.num_ranks))
    while runnable:
        rank = runnable.pop()
        for here in range(position[rank], ends[rank]):
            if not done[sources[here]] or not done[others[here]]:
                waiting[others[here] if done[sources[here]] else sources[here]] = rank
                break
            done[here] = True
            order.append(here)
            if here in waiting:
                runnable.append(waiting.pop(here))
        else:
            here = ends[rank]
        position[rank] = here
    if len(order) < num:
        raise _deadlock(compact, source, position)
    return Execution(np.array(order, np.int32), None)


def _in_waves(compact: "ActionArrays", source: Ints) -> Execution:
    import numpy as np

    num = compact.num_actions
    order, waves, start = np.empty(num, np.int32), [], 0
    done = np.zeros(num + 1, np.bool_)
    done[num] = True  # no input needed
    second = np.append(compact.second, False)
    position, ends = compact.offsets[:-1].copy(), compact.offsets[1:]
    while len(position):
        ready = done[source[position]]
        if compact.has_pairs:
            is_pair = second[position + 1]
            ready &= ~is_pair | done[source[position + is_pair]]
        firsts = position[ready]
        if not len(firsts):
            raise _deadlock(compact, source, _stops(compact, done))
        pairs = firsts[:0]
        if compact.has_pairs:
            is_pair = is_pair[ready]
            pairs = firsts[is_pair]
            firsts = np.concatenate([firsts[~is_pair], pairs])
        wave = Wave(start, start + len(firsts), start + len(firsts) + len(pairs))
        order[wave.start : wave.middle] = firsts
        order[wave.middle : wave.end] = pairs + 1
        done[order[wave.start : wave.end]] = True
        waves.append(wave)
        start = wave.end
        position[ready] += 1
        if compact.has_pairs:
            position += second[position] & ready
        if (position == ends).any():
            left = position < ends
            position, ends = position[left], ends[left]
    return Execution(order, waves)


def _stops(compact: "ActionArrays", done: Flags) -> list[int]:
    """Return the first action of each rank that has not run; its end where all have."""
    import numpy as np

    return [
        int(start) + int(np.count_nonzero(done[start:end]))
        for start, end in zip(compact.offsets[:-1], compact.offsets[1:], strict=True)
    ]


def _deadlock(compact: "ActionArrays", source: Ints, stops: list[int]) -> InvalidProgram:
    """Return the error with one cycle of waits; `stops`: the action that each rank stands before."""
    waits: dict[int, tuple[int, int]] = {}  # rank -> the action that waits, the action that it needs
    for rank, (here, end) in enumerate(zip(stops, compact.offsets[1:].tolist(), strict=True)):
        parts = [here, here + 1] if here + 1 < end and compact.second[here + 1] else [here]
        for part in parts if here < end else ():
            needed = int(source[part])
            if needed < compact.num_actions and needed >= stops[compact.rank[needed]]:
                waits.setdefault(rank, (part, needed))
    rank, path = next(iter(waits)), list[int]()
    while rank not in path:
        path.append(rank)
        rank = int(compact.rank[waits[rank][1]])
    cycle = path[path.index(rank) :]
    return InvalidProgram(compact.name, [_deadlock_text(compact, [waits[rank] for rank in cycle])], 1)


def _deadlock_text(compact: "ActionArrays", waits: list[tuple[int, int]]) -> str:
    places = [(compact.locate(waiting), compact.locate(needed)) for waiting, needed in waits]
    *others, last = sorted(here[0] for here, _ in places)
    who = f"ranks {', '.join(map(str, others))} and {last} wait for each other" if others else f"rank {last} is stuck"
    lines = [f"deadlock: {who}"]
    for (waiting, needed), (here, there) in zip(waits, places, strict=True):
        result = "activation" if compact.kind[waiting] == IS_F else "gradient"
        lines.append(
            f"rank {here[0]} stands before {compact.action(waiting)} (position {here[1]}), which needs the {result} of "
            f"{compact.action(needed)} on rank {there[0]} (position {there[1]})"
        )
    return "\n      ".join(lines)
