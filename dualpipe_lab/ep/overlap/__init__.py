"""1F1B for MoE layers: orders on two streams, their exact simulation, and their execution on real ranks.

Chapters: book/ep/one-f-one-b-basic, book/ep/one-f-one-b-overlap.
Orders, simulation and closed forms are pure data.  What runs them on tensors imports torch:
`overlap.executor`, `overlap.layer`, `overlap.stage`.
"""

from dualpipe_lab.ep.overlap.builders import (
    backward_alone,
    forward_alone,
    input_grads_alone,
    one_f_one_b_basic,
    one_f_one_b_overlap,
    weight_grads_alone,
)
from dualpipe_lab.ep.overlap.host import Call, host_calls
from dualpipe_lab.ep.overlap.operations import Op, parse_ops, ticks_of
from dualpipe_lab.ep.overlap.order import InvalidOrder, Order, check_pair
from dualpipe_lab.ep.overlap.simulator import Streams, bound, simulate, sums

__all__ = [
    "Call",
    "InvalidOrder",
    "Op",
    "Order",
    "Streams",
    "backward_alone",
    "bound",
    "check_pair",
    "forward_alone",
    "host_calls",
    "input_grads_alone",
    "one_f_one_b_basic",
    "one_f_one_b_overlap",
    "parse_ops",
    "simulate",
    "sums",
    "ticks_of",
    "weight_grads_alone",
]
