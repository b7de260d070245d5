"""Closed forms of the makespan of L layers, where a compute operation takes t_op and an all-to-all takes tau.

Chapters: book/ep/one-f-one-b-basic, book/ep/one-f-one-b-overlap.  In: L, t_op, tau.  Out: exact ticks.
  basic               L (6 t_op + 4 tau)
  overlap             max(6 L t_op + max(tau - t_op, 0), 4 L tau + max(2 t_op - tau, 0))
  overlap, unsplit    L max(6 t_op, 4 t_op + 2 tau, 4 tau)
  forward             2 L (t_op + tau)
  backward            max(4 L t_op + tau, 2 L (t_op + tau) + t_op)        split: the weight gradients fill the windows
  backward, unsplit   2 L (2 t_op + tau)
Equal to the simulator on a grid of sizes; the chapter derives them.
"""

from dualpipe_lab.timeline import Time


def overlap_makespan(num_layers: int, work: Time, comm: Time, split: bool = True) -> Time:
    """Return the makespan of the overlapped pair.

    >>> overlap_makespan(4, 2, 3), overlap_makespan(4, 2, 3, split=False)
    (49, 56)
    """
    if not split:
        return num_layers * max(6 * work, 4 * work + 2 * comm, 4 * comm)
    return max(6 * num_layers * work + max(comm - work, 0), 4 * num_layers * comm + max(2 * work - comm, 0))


def forward_makespan(num_layers: int, work: Time, comm: Time) -> Time:
    """Return the makespan of an unpaired forward.

    >>> forward_makespan(4, 2, 3)
    40
    """
    return 2 * num_layers * (work + comm)


def backward_makespan(num_layers: int, work: Time, comm: Time, split: bool = True) -> Time:
    """Return the makespan of an unpaired backward.

    >>> backward_makespan(4, 2, 2), backward_makespan(4, 2, 2, split=False)
    (34, 48)
    """
    if not split:
        return 2 * num_layers * (2 * work + comm)
    return max(4 * num_layers * work + comm, 2 * num_layers * (work + comm) + work)
