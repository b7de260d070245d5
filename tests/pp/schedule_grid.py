"""The grid on which every schedule of the registry is tested: p in 1, 2, 3, 4, 8 and m from 1 to 4p, where legal."""

from dualpipe_lab.pp import schedules

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
