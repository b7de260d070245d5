"""Exercises of "A tiny DeepSeek-V3": four numbers, the loads of two copies.

Chapter: book/whole/deepseek.  Orders and schedules are judged by exact simulation, biases on ranks beside one process.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Numbers, Off, compare_on_ranks, in_words
from dualpipe_course.declared import Predict, Repair
from dualpipe_lab.ep.overlap.closed_forms import overlap_makespan

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("GPUs with one expert", "microbatches with labels", "all-to-alls of rows", "ms of a pair")
_SLIPS = (
    {
        2: "64 GPUs hold a stage's experts once, and 128 hold them twice; DualPipe holds every stage on two ranks",
        32: "an expert of a stage lies on GPUs of that stage alone",
        128: "these are the GPUs of a pipeline rank; they share the experts 64 by 64",
        1: "128 GPUs share a pipeline rank, and 64 of them hold its experts once",
    },
    {
        20: "half of the microbatches meet their loss on the other rank",
        1: "the loss of every microbatch that enters at the other end is computed on rank 0",
    },
    {
        80: "rank 0 runs both stages, which have three layers with experts",
        240: "rank 0 runs each stage for 10 microbatches; the other 10 pass the copy",
        60: "a backward has two all-to-alls as well",
        30: "these are passes through layers with experts; each has four all-to-alls",
        200: "the dense layer sends no tokens",
    },
    {
        88: "this is the serial order: work and travel one after the other",
        48: "almost: the first M_B waits for C_B, and only A_F runs meanwhile",
        40: "this is the travel alone; the work takes longer",
    },
)
SPEED = 0.01


def _bias_in_words(off: Off) -> str:
    return off.slip or in_words(off)


def _with_balance(rank: int, world_size: int, fn: Callable[..., Any], ep_size: int) -> Found:
    import torch

    from dualpipe_lab.launch.mesh import Mesh
    from dualpipe_lab.topology import Topology

    mesh = Mesh(Topology([("pp", 2), ("ep", ep_size)]))
    pp_rank = mesh.rank("pp")
    counted = {key: _load(*key) for key in ((p, e, s) for p in (0, 1) for e in range(ep_size) for s in (0, 1))}
    stages = (0, 1) if pp_rank == 0 else (1, 0)  # the stage of this rank's own direction first
    biases = {stage: _bias(stage) for stage in stages}
    mine = {stage: counted[pp_rank, mesh.rank("ep"), stage].clone() for stage in stages}
    fn(biases, mine, mesh.group("ep"), mesh.group("pp"), SPEED)

    def moved(stage: int, *keys: tuple[int, int, int]) -> "Tensor":
        load = sum((counted[key] for key in keys), torch.zeros(4, dtype=torch.float64))
        return _bias(stage) + SPEED * torch.sign(load.mean() - load)

    expected, slips = {}, {}
    for stage in (0, 1):
        name, everywhere = f"biases of stage {stage}", [key for key in counted if key[2] == stage]
        expected[name] = Numbers.of(moved(stage, *everywhere))
        made = {
            "this copy has counted its own microbatches alone": [key for key in everywhere if key[0] == pp_rank],
            "this rank has counted its own tokens alone": [(pp_rank, mesh.rank("ep"), stage)],
            "the tokens of the other ranks along ep are missing": [k for k in everywhere if k[1] == mesh.rank("ep")],
            "loads of two stages were added: both ranks must go through their stages in one order": [
                (p, e, stage if p == pp_rank else 1 - stage) for p in (0, 1) for e in range(ep_size)
            ],
        }
        slips[name] = {text: Numbers.of(moved(stage, *keys)) for text, keys in made.items()}
        slips[name]["the bias has gone the other way"] = Numbers.of(2 * _bias(stage) - moved(stage, *everywhere))
    found = {f"biases of stage {stage}": Numbers.of(biases.get(stage)) for stage in (0, 1)}
    return Found(found, expected, slips)


def _load(pp_rank: int, ep_rank: int, stage: int) -> "Tensor":
    """Tokens that each of four experts got from one rank: copies, ranks and stages differ in who has too many."""
    import torch

    table = {
        (0, 0, 0): [9, 1, 3, 3], (1, 0, 0): [1, 4, 3, 8], (0, 1, 0): [0, 9, 6, 1], (1, 1, 0): [1, 9, 4, 2],
        (0, 0, 1): [2, 8, 1, 5], (1, 0, 1): [1, 2, 10, 3], (0, 1, 1): [1, 2, 12, 1], (1, 1, 1): [2, 7, 1, 6],
    }  # fmt: skip
    return torch.tensor(table[pp_rank, ep_rank, stage], dtype=torch.float64)


def _bias(stage: int) -> "Tensor":
    import torch

    return torch.tensor([0.1, -0.2, 0.3, 0.0], dtype=torch.float64) * (1 + stage)


def _judge_balance(fn: Callable[..., Any], ep_size: int) -> None:
    case = f"2 ranks of the pipeline x {ep_size} of experts"
    compare_on_ranks(_with_balance, 2 * ep_size, fn, ep_size, case=case, why=_bias_in_words, at=", rank {rank}: ")


numbers = Predict(
    "deepseek-1",
    "Four numbers of the plan",
    NAMES,
    lambda m, work, travel: (4, m // 2, 6 * m, overlap_makespan(2, work, travel)),
    "a step has {m} microbatches",
    "takes {work} ms for each of its 12 pieces of work and {travel} ms for",
    minutes=10,
    points=1,
    hints=(
        "2,048 / 16 GPUs share one rank of the pipeline. How often do 64 go into that, and how many ranks of the "
        "pipeline hold a stage?",
        "Rank 0 holds both stages: stage 0 for the microbatches that enter here, stage 1 for the others.",
        "The pair has 12 pieces of work and 8 all-to-alls; look at the longer sum, then at the beginning.",
    ),
    slips=_SLIPS,
    m=(20, 12, 16, 24, 28),
    work=(4, 5, 6, 7, 8),
    travel=lambda work, **_: work + 1,
    called={"m": "microbatches", "travel": "all-to-all"},
)


balance = Repair(
    "deepseek-4",
    "The loads of two copies",
    "Repair `balance(biases, loads, ep, pp, speed)`: both copies of a router keep the same biases.",
    cases=((1,), (2,)),
    judge=_judge_balance,
    right="both copies of both stages, on 2 and on 4 ranks: the biases of one process that counted all tokens",
    minutes=15,
    points=2,
    hints=(
        "Compare the biases of a stage on both ranks of the pipeline. Each has counted half of the microbatches.",
        "A load is to be summed over ep and over pp. In which order do the ranks of pp go through their stages?",
        "sorted(biases) is the same order on both ranks. On which loads is the sign taken?",
    ),
)
