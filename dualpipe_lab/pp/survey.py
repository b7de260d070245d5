"""Where every action of a program stands, and which actions cannot be right wherever they stand."""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from dualpipe_lab.pp.problems import Problems, listing
from dualpipe_lab.pp.program import MESSAGE_KINDS, WORK_KINDS, B, Cell, F, I, Overlap, Program, W, actions_of

Place: TypeAlias = tuple[int, int]  # rank, position in the rank's list


@dataclass
class Survey:
    """For every kind, the place of each (stage, microbatch)."""

    places: dict[str, dict[Cell, Place]] = field(
        default_factory=lambda: {kind: {} for kind in WORK_KINDS + MESSAGE_KINDS}
    )

    def backward(self, cell: Cell) -> tuple[str, Place]:
        """Return kind and place of the action that releases the gradient of a complete cell: its B, or else its I."""
        kind = B if cell in self.places[B] else I
        return kind, self.places[kind][cell]


def survey(program: Program, problems: Problems) -> Survey:
    """Find the place of every action; duplicates, unknown kinds, broken pairs and stray indices are problems."""
    found = Survey()
    for rank, steps in enumerate(program.ranks):
        if not steps:
            problems.add(f"rank {rank} has no actions; give it a stage or use fewer ranks")
        for position, step in enumerate(steps):
            if isinstance(step, Overlap) and (step.forward.kind != F or step.backward.kind not in (B, I)):
                problems.add(f"rank {rank}, position {position}: {step} must pair one F with one B or I, in this order")
            for action in actions_of(step):
                stage, kind, microbatch = action
                seen = found.places.get(kind)
                if seen is None:
                    problems.add(f"rank {rank}, position {position}: {action} is of the unknown kind {kind!r}")
                elif (cell := (stage, microbatch)) in seen:
                    first = "rank {}, position {}".format(*seen[cell])
                    problems.add(f"rank {rank}, position {position}: {action} runs again, it ran at {first}; keep one")
                else:
                    seen[cell] = (rank, position)
    _check_indices(program, found, problems)
    return found


def _check_indices(program: Program, found: Survey, problems: Problems) -> None:
    limits = ("stage", program.num_stages), ("microbatch", program.num_microbatches)
    for kind, places in found.places.items():
        for cell, (rank, position) in places.items():
            for (what, count), index in zip(limits, cell, strict=True):
                if not 0 <= index < count:
                    where = f"rank {rank}, position {position}: {cell[0]}{kind}{cell[1]}"
                    problems.add(f"{where} has {what} {index}, out of range 0..{count - 1}")


def check_complete(program: Program, found: Survey, problems: Problems) -> None:
    """Check that each stage runs each microbatch: exactly one F, and exactly one B or one I and one W."""
    forward, whole, for_input, for_weights = (found.places[kind].keys() for kind in (F, B, I, W))
    num_cells = program.num_stages * program.num_microbatches
    split_right = for_input == for_weights and not whole & for_input
    if len(forward) == num_cells > 0 and split_right and whole | for_input == forward:
        return
    cells = forward | whole | for_input | for_weights
    stages, microbatches = {stage for stage, _ in cells}, {microbatch for _, microbatch in cells}
    for what, present, count in (
        ("stage", stages, program.num_stages),
        ("microbatch", microbatches, program.num_microbatches),
    ):
        # The index may be a slip as large as 10**9: look for the first gaps only.
        for index in islice((index for index in range(count) if index not in present), 3):
            problems.add(f"no rank runs {what} {index} of 0..{count - 1}; number {what}s from 0 without gaps")
    lacking: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for microbatch in microbatches:
        for stage in stages:
            kinds = "".join(kind for kind in WORK_KINDS if (stage, microbatch) in found.places[kind])
            if lack := _lack(kinds):
                lacking[microbatch, lack].append(stage)
    for (microbatch, lack), where in sorted(lacking.items()):
        noun = "stage" if len(where) == 1 else "stages"
        problems.add(f"{noun} {listing(where)}, microbatch {microbatch}: {lack}")


def _lack(kinds: str) -> str:
    """Return what one stage's actions on one microbatch lack; kinds are in the order F B I W.

    >>> _lack("FIW"), _lack("FI"), _lack("FBW")
    ('', 'I without W: the weight gradient is never computed', 'B and W: the gradient would be computed twice')
    """
    if kinds in ("FB", "FIW"):
        return ""
    if kinds == "":
        return "never runs it (is a microbatch index out of range?)"
    if F not in kinds:
        return f"{' and '.join(kinds)} without F"
    if kinds == F:
        return "F without a backward"
    if B in kinds:
        return f"{' and '.join(kinds[1:])}: the gradient would be computed twice"
    if W in kinds:
        return "W without I: the gradient for the stage before is never computed"
    return "I without W: the weight gradient is never computed"


def check_order(found: Survey, problems: Problems) -> None:
    """Check that the actions of each complete cell share a rank and run in order: F, then B or I, then W."""
    for cell, forward in found.places[F].items():
        kind, backward = found.backward(cell)
        _check_after(cell, (F, forward), (kind, backward), problems)
        if kind == I:
            _check_after(cell, (I, backward), (W, found.places[W][cell]), problems)


def _check_after(cell: Cell, first: tuple[str, Place], then: tuple[str, Place], problems: Problems) -> None:
    (early, (early_rank, early_position)), (late, (late_rank, late_position)) = first, then
    one, other = f"{cell[0]}{early}{cell[1]}", f"{cell[0]}{late}{cell[1]}"
    if early_rank != late_rank:
        problems.add(f"{one} is on rank {early_rank} and {other} on rank {late_rank}; what {one} keeps is needed there")
    elif early_position == late_position:
        problems.add(f"rank {early_rank}, position {early_position}: {other} needs {one}, they cannot be one pair")
    elif early_position > late_position:
        problems.add(
            f"rank {early_rank}: {other} (position {late_position}) comes before {one} (position {early_position}), "
            "whose result it needs; swap them"
        )
