"""Judging rows of 1F1B for microbatches of different sizes on ranks with different rooms.

In: rows of F and B, tokens by microbatch, tokens by rank.  Out: nothing, or `Wrong` with the first broken limit.
  tokens held        on rank r at most `room[r]`; microbatches at most p - r
  last tick          at most that of the rule, where a rank uses no more room than any rank above it has
An F takes a tick for each token, a B two.
"""

from collections.abc import Sequence

from dualpipe_course.pp.loops import only_whole_backwards
from dualpipe_course.pp.programs import parse
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp.program import Action, B, F, Overlap, Program
from dualpipe_lab.pp.validation.validator import validate

TICKS = {F: 1, B: 2}  # for each token


def check_rows(answer: object, sizes: Sequence[int], room: Sequence[int], case: str) -> None:
    """Raise `Wrong` unless the rows end in time and no rank holds more than it may."""
    try:
        program = parse(answer, len(room), len(sizes))
        only_whole_backwards(program)
    except Wrong as wrong:
        raise Wrong(f"{case}: {wrong.message}") from None
    if any(isinstance(step, Overlap) for row in program.ranks for step in row):
        raise Wrong(f"{case}: a row has a pair; write F and B one after the other")
    for rank in range(len(room)):
        if elsewhere := [action for action in program.actions(rank) if action.stage != rank]:
            raise Wrong(f"{case}: {elsewhere[0]} is in the row of rank {rank}; stage s is on rank s")
        _check_held(program, rank, sizes, room, case)
    ticks, best = last_tick(program, sizes), last_tick(_by_the_rule(sizes, room), sizes)
    if ticks > best:
        raise Wrong(
            f"{case}: the rows end at tick {ticks}, by the rule they end at {best}: some rank runs a B where its next "
            "F fits\n  " + "\n  ".join(program.rows())
        )


def _check_held(program: Program, rank: int, sizes: Sequence[int], room: Sequence[int], case: str) -> None:
    held: set[int] = set()
    for _, kind, i in program.actions(rank):
        held = held | {i} if kind == F else held - {i}
        tokens = sum(sizes[j] for j in held)
        if tokens > room[rank]:
            raise Wrong(f"{case}: with {rank}F{i} rank {rank} holds {tokens} tokens, it has room for {room[rank]}")
        if len(held) > len(room) - rank:
            most = len(room) - rank
            raise Wrong(f"{case}: with {rank}F{i} rank {rank} holds {len(held)} microbatches, 1F1B holds {most}")


def last_tick(program: Program, sizes: Sequence[int]) -> int:
    """When a valid program of F and B ends."""
    clock, ends = [0] * program.num_ranks, dict[Action, int]()
    done = [0] * program.num_ranks
    for rank, end in validate(program).feasible_order or ():
        for action in list(program.actions(rank))[done[rank] : end]:
            stage, kind, i = action
            needed = Action(stage - 1, F, i) if kind == F else Action(stage + 1, B, i)
            clock[rank] = max(clock[rank], ends.get(needed, 0)) + TICKS[kind] * sizes[i]
            ends[action] = clock[rank]
        done[rank] = end
    return max(clock)


def _by_the_rule(sizes: Sequence[int], room: Sequence[int]) -> Program:
    ranks = [_row(rank, sizes, min(room[: rank + 1]), len(room) - rank) for rank in range(len(room))]
    return Program("by the rule", ranks, num_stages=len(room), num_microbatches=len(sizes))


def _row(rank: int, sizes: Sequence[int], limit: int, most: int) -> list[Action]:
    row: list[Action] = []
    f = b = 0
    while b < len(sizes):
        fits = f < len(sizes) and f + 1 - b <= most and sum(sizes[b : f + 1]) <= limit
        row.append(Action(rank, F, f) if fits else Action(rank, B, b))
        f, b = (f + 1, b) if fits else (f, b + 1)
    return row
