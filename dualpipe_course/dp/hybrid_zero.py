"""Exercises of "Hybrid ZeRO": its numbers, a plan for four nodes.

Chapter: book/dp/hybrid-zero.  A plan is judged by the library's own bytes.
"""

from fractions import Fraction

from dualpipe_course.declared import Predict, Puzzle
from dualpipe_course.plain import plain
from dualpipe_course.trial import partial_score
from dualpipe_course.wrong import Wrong
from dualpipe_lab.dp.closed_forms import ZERO_STAGES, bytes_per_parameter

NUMBERS = ("MB inside, per rank", "MB to other nodes, per rank", "MB out of a node of flat ZeRO-3", "bytes held")
_SLIPS: tuple[dict[int, str], ...] = (
    {13_500: "the gathers stay in a node of 4 ranks: (N_in - 1) / N_in", 2_160: "this is one microbatch"},
    {
        1_440: "the ranks of a node share this: each sums its shard, a quarter of the model",
        1_800: "the sum across nodes runs once per step, not once per microbatch",
        450: "the sum runs over the 4 ranks that hold the same shard: (N_out - 1) / N_out",
        180: "an all-reduce sends twice (N_out - 1) / N_out",
    },
    {
        54_000: "a ring leaves a node at one of its ranks",
        2_700: "this is one microbatch",
        10_800: "flat, the ring has 16 ranks",
    },
    {1: "16 / 16 is flat ZeRO-3; here a node holds a whole model", 16: "a node holds 16 bytes, its ranks share them"},
)

RANKS, NODE, PARAMETERS, BATCH = 32, 8, 4, 16  # of the puzzle; parameters in billions, sequences per rank and step
ROOM, PER_SEQUENCE = 24, Fraction(3, 2)  # GB
INSIDE, BETWEEN = 200, 25  # GB/s
BEST, START = 235, 1860  # ms


def _judge_plan(stage: object, shard_ranks: object, num_microbatches: object) -> str:
    from dualpipe_lab.dp.hybrid import hybrid_sent_bytes  # brings torch

    shard_ranks, num_microbatches = plain(shard_ranks), plain(num_microbatches)
    if stage is ... or shard_ranks is ... or num_microbatches is ...:
        raise Wrong("not answered yet: put your plan where the dots are")
    if type(stage) is not str or stage not in ZERO_STAGES:
        raise Wrong(f"a stage is one of {', '.join(ZERO_STAGES)}")
    if type(shard_ranks) is not int or shard_ranks < 1 or RANKS % shard_ranks:
        raise Wrong(f"the ranks that shard together are a divisor of {RANKS}")
    if type(num_microbatches) is not int or num_microbatches < 1 or BATCH % num_microbatches:
        raise Wrong(f"the number of microbatches is a divisor of {BATCH}")
    size = BATCH // num_microbatches
    if size < 2:
        raise Wrong("a microbatch of 1 sequence is too small for the matrices; 8 microbatches at most")
    held = bytes_per_parameter(stage, shard_ranks) * PARAMETERS
    if held + size * PER_SEQUENCE > ROOM:
        raise Wrong(
            f"{float(held):g} GB for weights, gradients and state and {float(size * PER_SEQUENCE):g} GB for the "
            f"activations of {size} sequences do not fit into {ROOM} GB"
        )
    sent = hybrid_sent_bytes(stage, shard_ranks, RANKS // shard_ranks, PARAMETERS * 1_000_000_000, num_microbatches)
    speed = INSIDE if shard_ranks <= NODE else BETWEEN
    group, replicas = Fraction(sent.intra, speed * 1_000_000), Fraction(sent.inter, BETWEEN * 1_000_000)
    total = group + replicas
    if total > BEST:
        raise Wrong(
            f"legal, but a step sends for {float(total):,.0f} ms ({float(group):,.0f} ms in the group, "
            f"{float(replicas):,.0f} ms among replicas); {BEST} ms are possible",
            score=partial_score(total, START, BEST),
        )
    return f"{int(total)} ms of sending per step, in {float(held + size * PER_SEQUENCE):g} of {ROOM} GB"


numbers = Predict(
    "hybrid_zero-1",
    "Four nodes of four",
    NUMBERS,
    lambda s, m: (2.25 * s * m, 0.375 * s, 2.8125 * s * m, 4),
    "{s:,} MB of bf16 weights, {m} microbatches per step.",
    minutes=6,
    points=1,
    hints=(
        "Per microbatch ZeRO-3 gathers twice and scatters once, now among the 4 ranks of a node.",
        "The sum across nodes is an all-reduce over 4 ranks of one shard, once per step.",
        "One ring over 16 ranks: each rank sends 15/16 of S three times per microbatch.",
    ),
    slips=_SLIPS,
    s=(960, 320, 480, 640, 800, 1280, 1600),
    m=(5, 3, 4, 6, 8),
    called={"s": "MB of weights", "m": "microbatches"},
)


plan = Puzzle(
    "hybrid_zero-4",
    "A plan for four nodes",
    "Choose stage, sharding group and microbatches so that a step spends at most 235 ms sending.",
    judge=_judge_plan,
    minutes=20,
    points=3,
    hints=(
        "First the memory: which stages leave room for 2 sequences if 8 ranks share? Bytes per parameter times 4 GB.",
        "More ranks in a group than a node has put all of its traffic on the slow links.",
        "ZeRO-2 sends (m + 1), ZeRO-3 sends 3 m. How few microbatches does each have room for?",
    ),
)
