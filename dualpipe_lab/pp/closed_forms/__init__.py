"""Closed forms of the schedules: what the simulator must give, to the last digit.

Chapter: book/pp.  In: numbers of ranks and of microbatches, a `Cost` per stage.  Out: exact ticks, or counts.
One file per family of schedules; a form that holds only under a condition refuses everything else and says why.
"""

from dualpipe_lab.pp.closed_forms.flush import (
    bubble_fraction,
    gpipe_makespan,
    gpipe_peak_activations,
    num_messages,
    one_f_one_b_makespan,
    one_f_one_b_peak_activations,
)

__all__ = [
    "bubble_fraction",
    "gpipe_makespan",
    "gpipe_peak_activations",
    "num_messages",
    "one_f_one_b_makespan",
    "one_f_one_b_peak_activations",
]
