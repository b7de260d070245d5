"""Closed forms of the schedules, exactly equal to the simulator's numbers, and those of recomputation.

Chapter: book/pp.  In: numbers of ranks and of microbatches, a `Cost` per stage.  Out: exact ticks, or counts.
The forms of a schedule stand beside its builder, in `dualpipe_lab.pp.schedules`.  A form that holds only under a
condition raises ValueError otherwise and says why.
  recomputation, L layers in segments of l layers (book/pp/gradient-checkpointing)
    stored        ceil(L / l) inputs of segments
    peak          stored, plus the saved tensors of l layers while one segment runs its backward
    best length   sqrt(L / a) where the saved tensors of a layer are a times its input
Source of recomputation: Chen et al. 2016 (arXiv 1604.06174), section 3.
"""

from dualpipe_lab.pp.schedules.dualpipe import (
    dualpipe_bubble,
    dualpipe_makespan,
    dualpipe_peak_activations,
    dualpipev_bubble,
    dualpipev_makespan,
    dualpipev_num_messages,
    dualpipev_peak_activations,
    published_dualpipe_bubble,
)
from dualpipe_lab.pp.schedules.easy_dualpipe import (
    easy_dualpipe_bubble,
    easy_dualpipe_makespan,
    easy_dualpipe_peak_activations,
)
from dualpipe_lab.pp.schedules.flush import (
    bubble_fraction,
    gpipe_makespan,
    gpipe_peak_activations,
    num_messages,
    one_f_one_b_makespan,
    one_f_one_b_peak_activations,
)
from dualpipe_lab.pp.schedules.looped import (
    interleaved_makespan,
    interleaved_peak_activations,
    looped_bfs_makespan,
    looped_bfs_peak_activations,
    looped_num_messages,
)
from dualpipe_lab.pp.schedules.paired import (
    paired_interleaved_makespan,
    paired_num_pairs,
    paired_one_f_one_b_makespan,
    paired_peak_activations,
    paired_zero_bubble_h1_makespan,
)
from dualpipe_lab.pp.schedules.pipedream import (
    double_buffered_version,
    double_buffered_versions_kept,
    stashed_version,
    stashed_versions_kept,
    synced_version,
    synced_versions_kept,
)
from dualpipe_lab.pp.schedules.v_shapes import (
    v_half_makespan,
    v_half_peak_activations,
    v_half_ticks_per_microbatch,
    v_min_makespan,
    v_min_peak_activations,
    v_min_ticks_per_microbatch,
    zbv_local_bubble,
    zbv_makespan,
    zbv_peak_activations,
)
from dualpipe_lab.pp.schedules.zero_bubble import (
    zero_bubble_h1_local_bubble,
    zero_bubble_h1_makespan,
    zero_bubble_h1_peak_activations,
    zero_bubble_h2_local_bubble,
    zero_bubble_h2_makespan,
    zero_bubble_h2_peak_activations,
)
from dualpipe_lab.timeline import Time

__all__ = [
    "bubble_fraction",
    "double_buffered_version",
    "double_buffered_versions_kept",
    "dualpipe_bubble",
    "dualpipe_makespan",
    "dualpipe_peak_activations",
    "dualpipev_bubble",
    "dualpipev_makespan",
    "dualpipev_num_messages",
    "dualpipev_peak_activations",
    "easy_dualpipe_bubble",
    "easy_dualpipe_makespan",
    "easy_dualpipe_peak_activations",
    "gpipe_makespan",
    "gpipe_peak_activations",
    "interleaved_makespan",
    "interleaved_peak_activations",
    "looped_bfs_makespan",
    "looped_bfs_peak_activations",
    "looped_num_messages",
    "num_messages",
    "one_f_one_b_makespan",
    "one_f_one_b_peak_activations",
    "paired_interleaved_makespan",
    "paired_num_pairs",
    "paired_one_f_one_b_makespan",
    "paired_peak_activations",
    "paired_zero_bubble_h1_makespan",
    "published_dualpipe_bubble",
    "recompute_peak",
    "recompute_stored",
    "stashed_version",
    "stashed_versions_kept",
    "synced_version",
    "synced_versions_kept",
    "v_half_makespan",
    "v_half_peak_activations",
    "v_half_ticks_per_microbatch",
    "v_min_makespan",
    "v_min_peak_activations",
    "v_min_ticks_per_microbatch",
    "zbv_local_bubble",
    "zbv_makespan",
    "zbv_peak_activations",
    "zero_bubble_h1_local_bubble",
    "zero_bubble_h1_makespan",
    "zero_bubble_h1_peak_activations",
    "zero_bubble_h2_local_bubble",
    "zero_bubble_h2_makespan",
    "zero_bubble_h2_peak_activations",
]


def recompute_stored(num_layers: int, length: int) -> int:
    """Return the number of segment inputs that are stored between forward and backward.

    >>> recompute_stored(16, 1), recompute_stored(16, 5)
    (16, 4)
    """
    _check(num_layers, length)
    return -(-num_layers // length)


def recompute_peak(num_layers: int, length: int, inside: Time) -> Time:
    """Return the peak in units of a layer's input; `inside`: the saved tensors of one layer, in the same unit.

    >>> recompute_peak(16, 4, inside=9)
    40
    """
    return recompute_stored(num_layers, length) + min(length, num_layers) * inside


def _check(num_layers: int, length: int) -> None:
    if num_layers < 1 or length < 1:
        raise ValueError(f"layers and segment lengths are at least 1, got {num_layers} and {length}")
