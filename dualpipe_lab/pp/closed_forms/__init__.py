"""Closed forms of the schedules, exactly equal to the simulator's numbers.

Chapter: book/pp.  In: numbers of ranks and of microbatches, a `Cost` per stage.  Out: exact ticks, or counts.
One file per family of schedules.  A form that holds only under a condition raises ValueError otherwise and says why.
"""

from dualpipe_lab.pp.closed_forms.dualpipe import (
    dualpipe_bubble,
    dualpipe_makespan,
    dualpipe_peak_activations,
    dualpipev_bubble,
    dualpipev_makespan,
    dualpipev_num_messages,
    dualpipev_peak_activations,
    published_dualpipe_bubble,
)
from dualpipe_lab.pp.closed_forms.easy_dualpipe import (
    easy_dualpipe_bubble,
    easy_dualpipe_makespan,
    easy_dualpipe_peak_activations,
)
from dualpipe_lab.pp.closed_forms.flush import (
    bubble_fraction,
    gpipe_makespan,
    gpipe_peak_activations,
    num_messages,
    one_f_one_b_makespan,
    one_f_one_b_peak_activations,
)
from dualpipe_lab.pp.closed_forms.looped import (
    interleaved_makespan,
    interleaved_peak_activations,
    looped_bfs_makespan,
    looped_bfs_peak_activations,
    looped_num_messages,
)
from dualpipe_lab.pp.closed_forms.paired import (
    paired_interleaved_makespan,
    paired_num_pairs,
    paired_one_f_one_b_makespan,
    paired_peak_activations,
    paired_zero_bubble_h1_makespan,
)
from dualpipe_lab.pp.closed_forms.pipedream import (
    double_buffered_version,
    double_buffered_versions_kept,
    stashed_version,
    stashed_versions_kept,
    synced_version,
    synced_versions_kept,
)
from dualpipe_lab.pp.closed_forms.recompute import recompute_best_length, recompute_peak, recompute_stored
from dualpipe_lab.pp.closed_forms.v_shapes import (
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
from dualpipe_lab.pp.closed_forms.zero_bubble import (
    zero_bubble_h1_local_bubble,
    zero_bubble_h1_makespan,
    zero_bubble_h1_peak_activations,
    zero_bubble_h2_local_bubble,
    zero_bubble_h2_makespan,
    zero_bubble_h2_peak_activations,
)

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
    "recompute_best_length",
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
