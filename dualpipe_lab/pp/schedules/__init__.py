"""The pipeline schedules: functions from sizes to a `Program`, and their registry by name.

Chapter: book/pp.  In: a name, the number of ranks and of microbatches.  Out: a `Program`.
"""

from inspect import signature
from typing import Any

from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.schedules import dualpipe as dual
from dualpipe_lab.pp.schedules import easy_dualpipe as easy
from dualpipe_lab.pp.schedules import flush, looped, paired, v_shapes, zero_bubble
from dualpipe_lab.pp.schedules import pipedream as steady
from dualpipe_lab.pp.schedules.dualpipe import dualpipe, dualpipev
from dualpipe_lab.pp.schedules.easy_dualpipe import easy_dualpipe
from dualpipe_lab.pp.schedules.flush import gpipe, one_f_one_b
from dualpipe_lab.pp.schedules.looped import interleaved, looped_bfs
from dualpipe_lab.pp.schedules.paired import paired_interleaved, paired_one_f_one_b, paired_zero_bubble_h1
from dualpipe_lab.pp.schedules.pipedream import pipedream
from dualpipe_lab.pp.schedules.schedule import Schedule
from dualpipe_lab.pp.schedules.v_shapes import v_half, v_min, zbv
from dualpipe_lab.pp.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2

__all__ = [
    "Schedule",
    "build",
    "dualpipe",
    "dualpipev",
    "easy_dualpipe",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "named",
    "names",
    "one_f_one_b",
    "options_of",
    "paired_interleaved",
    "paired_one_f_one_b",
    "paired_zero_bubble_h1",
    "pipedream",
    "v_half",
    "v_min",
    "zbv",
    "zero_bubble_h1",
    "zero_bubble_h2",
]

_MODULES = (flush, looped, zero_bubble, v_shapes, easy, dual, paired, steady)
_KNOWN: dict[str, Schedule] = {schedule.name: schedule for module in _MODULES for schedule in module.SCHEDULES}


def names(synchronous: bool | None = None, pairs: bool | None = None) -> list[str]:
    """Return the names that `build` knows, from the simplest schedule to the most elaborate.

    `synchronous`: only schedules that compute the gradient of the batch with one version of the weights (True), or only
    schedules that update in between and so compute another gradient (False).  The two must not be ranked together.
    `pairs`: True: a schedule that has a twin with overlapped pairs is replaced by the twin.  False: twins are left out;
    DualPipe and DualPipeV stay, for which `score(..., pairs=False)` counts a pair as F and then B.

    >>> names()[:2], names(synchronous=False)
    (['gpipe', '1f1b'], ['pipedream'])
    >>> names(pairs=True)[-3:], names(pairs=False)[-3:]
    (['paired_interleaved', 'paired_zero_bubble_h1', 'pipedream'], ['dualpipe', 'dualpipev', 'pipedream'])
    """
    twins = {name: schedule.paired for name, schedule in _KNOWN.items() if schedule.paired}
    left_out = () if pairs is None else twins if pairs else twins.values()
    return [
        name
        for name, schedule in _KNOWN.items()
        if name not in left_out and synchronous in (None, schedule.is_synchronous)
    ]


def build(name: str, num_ranks: int, num_microbatches: int, **options: Any) -> Program:
    """Build a schedule by name; case, spaces, dashes and underscores are ignored.

    `options` go to the builder.  Raises ValueError for an unknown name and for sizes that the schedule cannot have.

    >>> build("1F1B", 4, 8)
    <Program '1F1B': 4 ranks, 4 stages, 8 microbatches>
    """
    return named(name).build(num_ranks, num_microbatches, **options)


def options_of(name: str) -> list[str]:
    """Return the names of a schedule's options, without its sizes; ValueError for an unknown name.

    >>> options_of("gpipe")
    []
    """
    return list(signature(named(name).build).parameters)[2:]


def named(name: str) -> Schedule:
    """Return what is known of a schedule; ValueError for an unknown name.

    >>> named("1F1B").makespan(4, 8)
    33
    """
    if name in _KNOWN:
        return _KNOWN[name]
    wanted = _plain(name)
    for known, schedule in _KNOWN.items():
        if wanted in (_plain(known), _plain(schedule.build.__name__)):
            return schedule
    raise ValueError(f"there is no schedule named {name!r}; use one of {', '.join(names())}")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
