"""Exercises of "RMSNorm": what norms send, a norm whose features are cut.

Chapter: book/tp/rmsnorm.  Outputs and gradients are judged against one process, messages by the ledger.
"""

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.switched_off import Without
from dualpipe_course.tp import layers
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-6
NAMES = ("bytes for one norm", "bytes per step", "bytes in a forward", "multiple of the gradient")
_SLIPS = (
    {
        2_048: "those are the bytes of the weight; an all-reduce sends 2 (t - 1) / t of them",
        1_536: "that is the reduce-scatter alone; the finished sums are gathered too",
        196_608: "the sum over this rank's tokens is local; 512 numbers are sent, not 512 for each token",
    },
    {
        1_597_440: "a gradient that stays partial goes on growing locally; it is summed once, not per microbatch",
        3_072: "that is one norm",
        24_576: "that is one norm, summed after each microbatch",
    },
    {
        196_608: "features do not travel; only what all of them add up to",
        98_304: "features do not travel; only what all of them add up to",
        256: "those are the bytes of one number per token; an all-reduce sends 2 (t - 1) / t of them",
        768: "that is forward and backward together",
        96: "each of the 4 ranks has all 64 tokens",
    },
    {1: "all ranks have the complete gradient already, and the sum adds 4 of them"},
)
# ranks, shape of x: on 4 ranks 6 features are cut into 2 2 2 0
SIZES = ((1, (2, 3)), (2, (3, 4)), (2, (2, 2, 5)), (3, (4, 3)), (4, (2, 3, 6)), (4, (1, 8)))
_OF_CUT_NORM = {
    "y": ". On all ranks, all features of a token have one root, that of the mean of all squares",
    "dx": ". A token's dx is at right angles to its x, nearly: the products of all ranks add up to about zero",
    "dgamma": ". A feature's weight is on one rank, which has this feature of all tokens",
}
_OF_ONE_RANK = {"y": ". On one rank no message matters: is EPS under the root, added to the mean of the squares?"}


def _given(fn: Callable[..., Any], last: Any) -> Callable[..., Any]:
    return lambda *tensors: fn(*tensors, last)


def _norm(x: "Tensor", gamma: "Tensor") -> "Tensor":
    from torch.nn.functional import rms_norm

    return rms_norm(x, gamma.shape, gamma, EPS)


def _judge_cut_norm(function: Any) -> str:
    if not hasattr(function, "apply"):
        raise Wrong(f"this check takes the class CutNorm, got {type(function).__name__}")
    fn = Without(lambda *args: function.apply(*args), *layers.LIBRARY, "dualpipe_lab.tp.rms_norm")
    for num_ranks, shape in SIZES:
        case = layers.Case(num_ranks, {"x": shape, "gamma": shape[-1:]}, {"x": -1, "gamma": 0}, shape, -1)
        size = 8 * prod(shape[:-1])
        why = "One float64 number per token is summed on the way forward, and another on the way back."
        answer, hints = _given(fn, shape[-1]), _OF_CUT_NORM | (_OF_ONE_RANK if num_ranks == 1 else {})
        layers.check_layer(answer, _norm, case, forward=size, backward=size, because=why, hints=hints)
    return f"outputs and gradients equal one process in {len(SIZES)} cases, for one number per token each way"


numbers = Predict(
    "rmsnorm-1",
    "What norms send",
    NAMES,
    lambda h, tokens, t, norms: (8 * h * (t - 1) / t, 8 * h * (t - 1) / t * norms, 8 * tokens * (t - 1) / t, t),
    "A norm has {h:,} features, a microbatch {tokens} tokens, and {t} ranks",
    "A model has {norms} such norms",
    minutes=10,
    points=1,
    hints=(
        "A rank adds up its own tokens first. What is left to sum has as many numbers as the weight.",
        "A partial gradient can wait until the last microbatch: it is linear.",
        "With cut features a rank has one sum of squares for each of the 64 tokens.",
    ),
    slips=_SLIPS,
    h=(512, 256, 1024),
    tokens=(64, 32, 128),
    t=(4, 2, 8),
    norms=(65, 33, 49),
    called={"h": "features", "t": "ranks"},
)

cut_norm = Implement(
    "rmsnorm-2",
    "A norm whose features are cut",
    "Write `CutNorm`, an autograd Function: outputs and gradients of one process, one number per token each way.",
    judge=_judge_cut_norm,
    minutes=15,
    points=4,
    hints=(
        "This rank's squares add up to one number per token. Sum it over the ranks before you divide by hidden_size.",
        "dx is (gamma dy - normal * mean) / root. Over which features does that mean of gamma dy normal run?",
        "All features of all ranks: sum over your own, comm.all_reduce, divide by hidden_size. dgamma sends nothing.",
    ),
)
