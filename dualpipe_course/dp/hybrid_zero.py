"""Exercises of "Hybrid ZeRO": its numbers, a mean divided twice, a plan for four nodes.

Chapter: book/dp/hybrid-zero.  Sums are judged on real ranks by their values and by what the ledger saw leave a node.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, Unchanged, compare_on_ranks, other_dtype
from dualpipe_course.declared import Predict, Puzzle, Repair
from dualpipe_course.plain import plain
from dualpipe_course.trial import partial_score
from dualpipe_course.wrong import Wrong
from dualpipe_lab.dp.closed_forms import ZERO_STAGES, bytes_per_parameter
from dualpipe_lab.launch.causes import cause_of_ratio
from dualpipe_lab.launch.record import traffic
from dualpipe_lab.topology import Topology

if TYPE_CHECKING:
    from dualpipe_lab.dp.hybrid import NodeBytes


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
WIDTH = 8  # bytes of a number


def _check_mean(fn: Callable[..., Any], per_node: int, num_nodes: int) -> None:
    """Raise `Wrong` unless every rank gets its shard of the mean over all ranks."""
    compare_on_ranks(
        _mean,
        per_node * num_nodes,
        fn,
        per_node,
        2 * per_node,
        case=f"{num_nodes} node(s) of {per_node} rank(s)",
        why=lambda off: _mean_in_words(off, per_node, num_nodes),
        limits=_limits(per_node, num_nodes, 2, (per_node - 1) * 2 * WIDTH),
    )


def _limits(per_node: int, num_nodes: int, shard: int, inside: int) -> list[Limit]:
    """Bytes of an all-reduce of one shard out of a node and, less dear, `inside` within it."""
    chunks = [WIDTH * size for size in traffic.split(shard, num_nodes)]
    out = (
        "rank {rank} sent {found} bytes to other nodes, {most} are enough: first sum inside the node, so that each "
        f"rank has a shard of {shard} number(s) left to sum across"
    )
    within = "rank {rank} sent {found} bytes inside its node, {most} are enough: one shard to each neighbour"
    most = [traffic.all_reduce(chunks, node).sent for node in range(num_nodes) for _ in range(per_node)]
    return [Limit("to other nodes", most, out, scope="each"), Limit("inside", inside, within, scope="each")]


def _mean_in_words(off: Off, per_node: int, num_nodes: int) -> str:
    if off.found is None or off.has_other_shape:
        returned = "no tensor" if off.found is None else off.found.flat
        return f"returned {returned}, expected its shard, 2 of {2 * per_node} numbers"
    said = f"has {off.found.flat}, expected {off.expected.flat}"
    return f"{said}: {off.ratio:.4g} times it{cause_of_ratio(off.ratio, per_node * num_nodes)}" if off.ratio else said


def _numbers(rank: int, numel: int) -> list[int]:
    """Every rank has other numbers, no mean of which is 0."""
    return [(rank + 2) * 10 ** (rank % 5) + place * (rank + 1) for place in range(numel)]


def _groups(per_node: int) -> Any:
    from dualpipe_lab.launch.context import rank_context
    from dualpipe_lab.launch.mesh import Mesh

    topology = Topology([("dp", rank_context().world_size)], ranks_per_node=per_node)
    mesh = Mesh(topology)
    return topology, mesh.group("shard"), mesh.group("replica")


def _mean(rank: int, world_size: int, fn: Callable[..., Any], per_node: int, numel: int) -> Found:
    import torch

    from dualpipe_lab.dp.hybrid import count_by_node

    topology, node, across = _groups(per_node)
    inputs = torch.tensor([_numbers(other, numel) for other in range(world_size)], dtype=torch.float64)
    ledger, grad, first = count_by_node(topology), inputs[rank].clone(), rank % per_node * 2
    unchanged = Unchanged(grad=grad)
    shard = fn(grad, node, across)
    found = {"shard": Numbers.of(shard)}
    expected = {"shard": Numbers.of(inputs.mean(0)[first : first + 2])}
    changed = "grad has changed; leave it as it is and return a tensor of your own" if unchanged.first() else ""
    costs = _costs(ledger.total())
    return Found(found, expected, costs=costs, refused=other_dtype(grad, shard), changed=changed)


def _costs(sent: "NodeBytes") -> dict[str, float]:
    return {"to other nodes": sent.inter, "inside": sent.intra}


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


mean_shard = Repair(
    "hybrid_zero-3",
    "A mean that shrinks",
    "Repair the shard of the mean gradient for more than one node.",
    cases=((2, 1), (2, 2), (1, 2), (1, 3), (3, 2)),
    judge=_check_mean,
    right="the mean over all ranks on 1, 2 and 3 nodes, and a shard per rank leaves the node",
    minutes=8,
    points=2,
    hints=(
        "Try it on one node, then on two. By what factor does the result change?",
        "Count the divisions: by how much does each line divide, and how many ranks are there?",
        "The ranks of all nodes together are N_in * N_out. Divide by that once, wherever you like.",
    ),
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
