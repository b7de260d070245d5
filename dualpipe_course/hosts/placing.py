"""Exercises of "What the network does to each axis": three numbers, the order with the fewest bytes.

Chapter: book/hosts/placing.  Orders are compared by the exact prediction `Plan.traffic`, of which any least one counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, TypeAlias

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.plain import plain
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong
from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.plan import Plan
from dualpipe_lab.topology import AXES

NAMES = ("ms of bubble", "GB/s at which both are equal", "GB/s with 8 microbatches")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        24: "this is its fraction of the longer step; the bubble is one of 4 microbatches, 120 / 4",
        60: "two stages are idle for one microbatch's work, not for two",
        120: "the bubble is the work of one microbatch, 120 ms / 4",
        15: "a stage is idle for the forward and the backward of one microbatch: 120 ms / 4",
    },
    {
        20: "this is for a bubble of 24 ms; 480 MB in 30 ms",
        17: "pp waits for 4 messages of 5 MB meanwhile, so 480 MB and not 500 make the difference",
        15: "pp waits for 4 of its 8 messages, 20 MB",
        62: "divide the bytes by the bubble's time, not the other way round",
    },
    {
        16: "with 8 microbatches the bubble is shorter",
        64: "the bubble is a half of what it was, not a quarter",
        31: "8 messages of 2.5 MB are 20 MB as before",
        8: "a shorter bubble makes pp better, so the network may be faster",
    },
)

Config: TypeAlias = LlamaConfig | V3MoEConfig
DENSE = LlamaConfig(hidden_size=32, ffn_size=64, num_layers=3, num_heads=8, num_kv_heads=4)
SPARSE = V3MoEConfig(hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=32, expert_ffn_size=8)


Case: TypeAlias = tuple[Plan, Config, int, int, int]


def leaving(case: Case, order: Sequence[str]) -> int:
    """Bytes between nodes of a step when the plan of a case has this order."""
    plan, config, batch_size, length, ranks_per_node = case
    step = replace(plan, order=tuple(order)).traffic(config, batch_size, length)
    return step.ledger.between_nodes(ranks_per_node)


def _orders(plan: Plan) -> Iterator[tuple[str, ...]]:
    """The orders of the axes with several ranks, and the others behind them."""
    used = [axis for axis, size in plan.sizes.items() if size > 1]
    for order in permutations(used):
        yield (*order, *(axis for axis in AXES if axis not in used))


def _order_of(value: Any, case: Case, where: str) -> tuple[str, ...]:
    """The order of an answer, with the axes of one rank behind the others where it leaves them out."""
    names = plain(value)
    used = [axis for axis, size in case[0].sizes.items() if size > 1]
    if not isinstance(names, list) or any(type(name) is not str for name in names):
        raise Wrong(f"{where}: return a list with the names of the axes, got {value!r:.80}")
    if len(set(names)) != len(names) or not set(used) <= set(names) <= set(AXES):
        raise Wrong(f"{where}: an order has each of {', '.join(used)} once, got {names}")
    return (*names, *(axis for axis in AXES if axis not in names))


def _words(case: Case) -> str:
    plan, _, batch_size, length, ranks_per_node = case
    return f"{plan}, {batch_size} sequences of {length} tokens, {ranks_per_node} ranks per node"


def _short(case: Case, order: Sequence[str]) -> str:
    return " ".join(axis for axis in order if case[0].sizes[axis] > 1)


def _cases() -> Iterator[Case]:
    m: dict[str, Any] = {"num_microbatches": 2}
    cube = Plan(pp=2, dp=2, tp=2, **m)
    yield Plan(dp=2, tp=2), DENSE, 4, 4, 2
    yield Plan(dp=2, tp=2), DENSE, 4, 64, 2  # more tokens: tp sends more than the gradients
    for ranks_per_node in (2, 4):
        yield cube, DENSE, 8, 4, ranks_per_node
        yield cube, DENSE, 8, 32, ranks_per_node
    yield Plan(pp=3, dp=2, tp=2, **m), DENSE, 4, 32, 4  # a node holds a part of pp
    yield Plan(pp=3, dp=2, tp=2, **m), DENSE, 4, 4, 3
    yield Plan(pp=3, dp=4, **m), DENSE, 8, 16, 6
    yield Plan(dp=2, cp=2, tp=2), DENSE, 4, 16, 4
    yield Plan(dp=2, ep=2, tp=2, zero=1), SPARSE, 4, 16, 2
    yield Plan(pp=2, ep=4, **m), SPARSE, 16, 16, 4
    yield Plan(dp=8, zero=3), DENSE, 8, 4, 4  # one order


def _judge_place(fn: Callable[..., Any]) -> str:
    cases = list(_cases())
    for case, (is_fine, value) in zip(cases, call_each(fn, cases), strict=True):
        where = _words(case)
        if not is_fine:
            raise Wrong(ended(where, value))
        order = _order_of(value, case, where)
        orders = {each: leaving(case, each) for each in _orders(case[0])}
        least, found = min(orders.values()), leaving(case, order)
        if found != least:
            best = next(each for each, sent in orders.items() if sent == least)
            raise Wrong(f"{where}: {_short(case, order)} sends {found:,} bytes, {_short(case, best)} {least:,}")
    return f"the fewest bytes in all {len(cases)} cases, some with nodes that end in the middle of an axis"


numbers = Predict(
    "placing-1",
    "Where two plans are equal",
    NAMES,
    lambda work, grads: (work / 4, 4 * (grads - 20) / work, 8 * (grads - 20) / work),
    "A step has {work} ms of arithmetic",
    "waits for {grads} MB of gradients",
    minutes=8,
    points=2,
    hints=(
        "With two stages each stage is idle for as long as one microbatch takes. How many of them make 120 ms?",
        "dp waits for 500 MB, pp for 20 MB and its bubble. Both waits are equal at the speed that is asked for.",
        "Microbatches of half the size: the bubble shrinks, the bytes of m messages do not.",
    ),
    slips=_SLIPS,
    work=(120, 80, 96, 160, 200),
    grads=(500, 260, 380, 420, 620, 740, 820, 980),
    called={"grads": "MB of gradients"},
)

place = Implement(
    "placing-2",
    "The fewest bytes between nodes",
    "Write `place(...)`: the order of a plan's axes that sends the fewest bytes between nodes.",
    judge=_judge_place,
    minutes=20,
    points=3,
    hints=(
        "Five axes have 120 orders; those with one rank change nothing. itertools.permutations lists the rest.",
        "dataclasses.replace(plan, order=...) is the same plan with another order. An order has all five axes.",
        "plan.traffic(config, batch_size, sequence_length).ledger.between_nodes(ranks_per_node) is what to minimise.",
    ),
)
