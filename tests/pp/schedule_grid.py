"""What tests of schedules share: recorded programs, ticks, and sizes: p in 1, 2, 3, 4, 8 and m from 1 to 4p."""

import json

from hypothesis import strategies as st
from runs import ORACLES as FOLDER

from dualpipe_lab.pp import schedules

ORACLES = json.loads((FOLDER / "programs.json").read_text())
EXACT = st.one_of(st.integers(0, 50), st.fractions(0, 50, max_denominator=30))

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in range(1, 4 * p + 1)]


def legal(name, sizes=SIZES, **options):
    """Every program of a schedule on the grid; sizes that it refuses are left out."""
    for p, m in sizes:
        try:
            yield schedules.build(name, p, m, **options)
        except ValueError:
            continue


def num_crossings(program):
    """How many (boundary, microbatch) pairs lie between two ranks: each carries one message down and one up."""
    return sum(
        program.placement[stage, m] != program.placement[stage + 1, m]
        for stage in range(program.num_stages - 1)
        for m in range(program.num_microbatches)
    )
