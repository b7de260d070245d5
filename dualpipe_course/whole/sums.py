"""Exercises of "Who sums what with whom": groups to predict.

Chapter: book/whole/sums.  The sums are compared on real ranks with closed values.
"""

from typing import TYPE_CHECKING

from dualpipe_course.declared import Predict

if TYPE_CHECKING:
    pass

NAMES = ("ranks of the attention's sum", "ranks of an expert's sum", "copies of a router", "groups that sum experts")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        24: "mirrors add before, and along tp no rank adds: the other rank of tp has another part of the matrix",
        3: "ranks along ep have other sentences too",
        4: "ranks along dp have other sentences too",
        48: "these are all ranks; only those with the same shard and other sentences add",
    },
    {
        12: "ranks along ep hold other experts; added, they would mix gradients of different weights",
        6: "ranks along tp hold the same experts and see the same tokens",
        1: "ranks along dp hold the same experts and have other sentences",
    },
    {
        12: "these are the ranks that sum it; ranks along tp, and mirrors, hold it too",
        24: "two axes beside dp and ep hold it too: tp, and under DualPipe both ranks of pp",
    },
    {4: "these are the groups of the router's sum", 8: "ranks along tp and both ranks of pp have groups of their own"},
)


groups = Predict(
    "sums-1",
    "Four groups",
    NAMES,
    lambda dp, ep, tp, ranks: (dp * ep, dp, ranks, ranks / dp),
    "x dp {dp} x ep {ep} x tp {tp}",
    ", on {ranks} ranks.",
    minutes=8,
    points=1,
    hints=(
        "For each parameter: along which axes is it the same, and along which of those do ranks see other tokens?",
        "DualPipe on two ranks of pp: each of the two holds both stages.",
        "Groups that are alike: all ranks over the ranks of one group.",
    ),
    slips=_SLIPS,
    dp=(3, 2, 4, 5, 6),
    ep=(4, 2, 8),
    tp=(2, 4),
    ranks=lambda dp, ep, tp: 2 * dp * ep * tp,
)
