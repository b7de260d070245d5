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

from dualpipe_lab.pp.schedules.dualpipe import dualpipe_bubble as dualpipe_bubble
from dualpipe_lab.pp.schedules.dualpipe import dualpipe_makespan as dualpipe_makespan
from dualpipe_lab.pp.schedules.dualpipe import dualpipe_peak_activations as dualpipe_peak_activations
from dualpipe_lab.pp.schedules.dualpipe import dualpipev_makespan as dualpipev_makespan
from dualpipe_lab.pp.schedules.dualpipe import dualpipev_num_messages as dualpipev_num_messages
from dualpipe_lab.pp.schedules.dualpipe import dualpipev_peak_activations as dualpipev_peak_activations
from dualpipe_lab.pp.schedules.easy_dualpipe import easy_dualpipe_bubble as easy_dualpipe_bubble
from dualpipe_lab.pp.schedules.easy_dualpipe import easy_dualpipe_makespan as easy_dualpipe_makespan
from dualpipe_lab.pp.schedules.easy_dualpipe import easy_dualpipe_peak_activations as easy_dualpipe_peak_activations
from dualpipe_lab.pp.schedules.flush import bubble_fraction as bubble_fraction
from dualpipe_lab.pp.schedules.flush import gpipe_makespan as gpipe_makespan
from dualpipe_lab.pp.schedules.flush import gpipe_peak_activations as gpipe_peak_activations
from dualpipe_lab.pp.schedules.flush import num_messages as num_messages
from dualpipe_lab.pp.schedules.flush import one_f_one_b_makespan as one_f_one_b_makespan
from dualpipe_lab.pp.schedules.flush import one_f_one_b_peak_activations as one_f_one_b_peak_activations
from dualpipe_lab.pp.schedules.looped import interleaved_makespan as interleaved_makespan
from dualpipe_lab.pp.schedules.looped import interleaved_peak_activations as interleaved_peak_activations
from dualpipe_lab.pp.schedules.looped import looped_bfs_makespan as looped_bfs_makespan
from dualpipe_lab.pp.schedules.looped import looped_bfs_peak_activations as looped_bfs_peak_activations
from dualpipe_lab.pp.schedules.looped import looped_num_messages as looped_num_messages
from dualpipe_lab.pp.schedules.paired import paired_interleaved_makespan as paired_interleaved_makespan
from dualpipe_lab.pp.schedules.paired import paired_one_f_one_b_makespan as paired_one_f_one_b_makespan
from dualpipe_lab.pp.schedules.paired import paired_zero_bubble_h1_makespan as paired_zero_bubble_h1_makespan
from dualpipe_lab.pp.schedules.v_shapes import v_half_makespan as v_half_makespan
from dualpipe_lab.pp.schedules.v_shapes import v_half_peak_activations as v_half_peak_activations
from dualpipe_lab.pp.schedules.v_shapes import v_half_ticks_per_microbatch as v_half_ticks_per_microbatch
from dualpipe_lab.pp.schedules.v_shapes import v_min_makespan as v_min_makespan
from dualpipe_lab.pp.schedules.v_shapes import v_min_peak_activations as v_min_peak_activations
from dualpipe_lab.pp.schedules.v_shapes import v_min_ticks_per_microbatch as v_min_ticks_per_microbatch
from dualpipe_lab.pp.schedules.v_shapes import zbv_makespan as zbv_makespan
from dualpipe_lab.pp.schedules.v_shapes import zbv_peak_activations as zbv_peak_activations
from dualpipe_lab.pp.schedules.zero_bubble import zero_bubble_h1_makespan as zero_bubble_h1_makespan
from dualpipe_lab.pp.schedules.zero_bubble import zero_bubble_h1_peak_activations as zero_bubble_h1_peak_activations
from dualpipe_lab.pp.schedules.zero_bubble import zero_bubble_h2_local_bubble as zero_bubble_h2_local_bubble
from dualpipe_lab.pp.schedules.zero_bubble import zero_bubble_h2_makespan as zero_bubble_h2_makespan
from dualpipe_lab.pp.schedules.zero_bubble import zero_bubble_h2_peak_activations as zero_bubble_h2_peak_activations
from dualpipe_lab.timeline import Time


def recompute_peak(num_layers: int, length: int, inside: Time) -> Time:
    """Return the peak in units of a layer's input; `inside`: the saved tensors of one layer, in the same unit.

    >>> recompute_peak(16, 4, inside=9)
    40
    """
    if num_layers < 1 or length < 1:
        raise ValueError(f"layers and segment lengths are at least 1, got {num_layers} and {length}")
    return -(-num_layers // length) + min(length, num_layers) * inside


__all__ = sorted(name for name, value in list(globals().items()) if callable(value))
