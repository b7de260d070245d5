"""The orders of torch's schedules with stages on a loop or a V, without its constructors, which build messages too."""

from torch.distributed.pipelining import schedules as torch_schedules


def looped_rows(name, num_ranks, num_microbatches, num_local_stages):
    """One row of text per rank, or None where torch refuses the sizes."""
    schedule = object.__new__(torch_schedules.get_schedule_class(name))
    num_rounds = max(1, num_microbatches // num_ranks)
    if name != "LoopedBFS" and num_microbatches % num_rounds:
        return None
    schedule._stages = [None] * num_local_stages
    schedule.pp_group_size, schedule.n_local_stages = num_ranks, num_local_stages
    schedule._n_microbatches, schedule.microbatches_per_round = num_microbatches, num_microbatches // num_rounds
    return [
        " ".join(str(action) for action in schedule._calculate_single_rank_operations(rank) if action is not None)
        for rank in range(num_ranks)
    ]


def zbv_rows(num_ranks, num_microbatches):
    """One row of text per rank; torch leaves the microbatches that there are not out of a schedule of 2P - 1."""
    schedule = object.__new__(torch_schedules.get_schedule_class("ZBVZeroBubble"))
    schedule.pp_group_size, schedule.num_stages, schedule._n_microbatches = num_ranks, 2 * num_ranks, num_microbatches
    return [
        " ".join(str(action) for action in schedule._calculate_single_rank_operations(rank) if action is not None)
        for rank in range(num_ranks)
    ]
