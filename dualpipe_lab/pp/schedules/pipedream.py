"""PipeDream: 1F1B without a flush; a stage updates its weights after the backward of every minibatch.

Chapter: book/pp/pipedream.  In: P ranks, M minibatches of a run.  Out: one list of actions per rank; stage = rank.
  order              1F1B's, over all minibatches of a run instead of the microbatches of one batch
  update             each stage after each of its backwards; 2BW: after every m-th
  makespan           (M + P - 1) * (t_F + t_B): the pipeline fills and drains once per run, not once per batch
  live activations   min(P - rank, M)
  weight versions    P - stage, see `dualpipe_lab.pp.versions`
The gradient differs from that of every synchronous schedule: F and B of minibatch j use weights that are
P - 1 - stage updates old.  So `names(synchronous=True)` leaves PipeDream out, and its numbers must not be ranked beside
those of schedules that compute the batch's gradient.  Run without updates in between, the program is 1F1B.
Elsewhere: msr-fiddle/pipedream (2019); Megatron's 1F1B is called PipeDream-flush because of its ancestor.
Source: Harlap et al. 2018 (arXiv 1806.03377), section 3; Narayanan et al. 2019 (SOSP), section 3.
"""

from dualpipe_lab.pp.program import Program, check_counts
from dualpipe_lab.pp.schedules.one_f_one_b import one_f_one_b


def pipedream(num_ranks: int, num_microbatches: int) -> Program:
    """Build a run of PipeDream; `num_microbatches` is its number of minibatches, each with an update.

    >>> " ".join(map(str, pipedream(2, 3).ranks[0]))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    check_counts("pipedream", num_ranks=num_ranks, num_microbatches=num_microbatches)
    order = one_f_one_b(num_ranks, num_microbatches).ranks
    return Program("PipeDream (async)", order, num_ranks, num_microbatches, num_directions=1)
