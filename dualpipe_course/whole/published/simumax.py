"""SimuMax's measurements on 8 B200: allocated memory of 19 plans, milliseconds of 31 dense steps and 12 with experts.

Chapter: book/whole/predictions.  bf16, microbatches of one sequence; Megatron core 0.14 with Transformer Engine 2.11,
without overlapped tp, whose cross-entropy keeps logits alone and writes their gradient over them; all-to-all along cp;
one dense layer and tokens up to a capacity, so even routing.  Its script gives 405B 16 key heads; Llama has 8.
No number is fitted to the rows of memory.  Of the steps one row says how much of the peak products reach, one of tp 8
how much of NVLink's bandwidth, one of 131,072 tokens how fast attention is; the others are predicted, and all of those
with experts.
Source: MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md, commit 4dcaae51, with the published errors of
SimuMax in percent, whose operators have measured tables of that machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TypeAlias

from dualpipe_course.whole.published import Pair
from dualpipe_course.whole.published.fits import solve, with_attention, with_inside, with_products
from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.plan import MEGATRON, MEGATRON_TIME, Cluster, Plan, StepTimer, estimate, step_time
from dualpipe_lab.tp import LatentSizes

Model: TypeAlias = LlamaConfig | V3MoEConfig


def _llama(num_layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(128256, hidden, ffn, num_layers, heads, kv_heads)


def _deepseek(
    vocabulary: int, hidden: int, ffn: int, expert_ffn: int, num_experts: int, k: int, num_shared: int
) -> V3MoEConfig:
    """Four layers of DeepSeek-V2 or V3, one of them dense, with softmax scores."""
    return V3MoEConfig(
        vocabulary, hidden, 4, 1, 128, ffn_size=ffn, expert_ffn_size=expert_ffn, num_experts=num_experts,
        num_experts_per_token=k, num_groups=1, num_groups_per_token=1, num_shared_experts=num_shared,
        scoring="softmax", normalise=False, selection_bias=False, latent=LatentSizes(),
    )  # fmt: skip


MEMORY_RULES = replace(MEGATRON, logit_bytes=2, loss_bytes=0, keeps_exchanged=True)
LLAMA_70B, LLAMA_405B = _llama(12, 8192, 28672, 64, 8), _llama(4, 16384, 53248, 128, 16)
V2, V3 = _deepseek(102400, 5120, 12288, 1536, 160, 6, 2), _deepseek(129280, 7168, 18432, 2048, 256, 8, 1)
MEMORY: dict[
    str, list[tuple[Model, dict[str, int], int, float, float]]
] = {  # model, plan, tokens, GiB, SimuMax's error
    "dense": [
        (LLAMA_70B, {"tp": 1, "pp": 2, "dp": 4}, 4096, 66.55, -0.17),
        (LLAMA_70B, {"tp": 2, "dp": 4}, 4096, 60.68, -0.28),
        (LLAMA_70B, {"tp": 4, "dp": 2}, 4096, 39.07, -0.33),
        (LLAMA_70B, {"tp": 8}, 4096, 28.29, -0.42),
        (LLAMA_405B, {"tp": 1, "pp": 2, "dp": 4}, 4096, 87.08, -0.23),
        (LLAMA_405B, {"tp": 2, "dp": 4}, 4096, 81.59, -0.34),
        (LLAMA_405B, {"tp": 4, "dp": 2}, 4096, 52.89, -0.40),
        (LLAMA_405B, {"tp": 8}, 4096, 38.57, -0.49),
    ],
    "cp": [
        (LLAMA_70B, {"tp": 2, "cp": 4}, 32768, 68.43, -0.39),
        (LLAMA_70B, {"tp": 1, "cp": 8}, 32768, 104.51, -0.08),
        (LLAMA_70B, {"tp": 2, "cp": 4}, 131072, 112.67, -0.77),
        (LLAMA_70B, {"tp": 1, "cp": 8}, 131072, 147.99, -0.07),
        (LLAMA_405B, {"tp": 2, "cp": 4}, 32768, 87.03, -0.55),
        (LLAMA_405B, {"tp": 1, "cp": 8}, 32768, 139.22, -0.06),
        (LLAMA_405B, {"tp": 2, "cp": 4}, 131072, 118.13, -1.38),
    ],
    "experts": [
        (V2, {"dp": 8, "ep": 8}, 4096, 45.63, -0.50),
        (V2, {"pp": 2, "dp": 4, "ep": 4}, 4096, 44.70, -0.74),
        (V3, {"dp": 8, "ep": 8}, 4096, 104.30, -0.75),
        (V3, {"pp": 2, "dp": 4, "ep": 4}, 4096, 114.00, -0.81),
    ],
}


def memory_plan(model: Model, sizes: dict[str, int]) -> Plan:
    """The plan of a row of memory: 4 microbatches, ZeRO-1 where ranks share data."""
    pp, tp, dp, cp, ep = (sizes.get(axis, 1) for axis in ("pp", "tp", "dp", "cp", "ep"))
    return Plan(
        pp=pp, tp=tp, dp=dp, cp=cp, ep=ep, num_microbatches=4, precision="bfloat16", sequence_parallel=tp > 1,
        zero=int(dp * cp > 1), experts_in_data="ep" in sizes, layers=(model.num_layers // pp,) * pp,
    )  # fmt: skip


def gibibytes(model: Model, sizes: dict[str, int], length: int) -> float:
    """The estimated memory of the largest rank of a row."""
    plan = memory_plan(model, sizes)
    found = estimate(model, plan, Cluster.of("b200", 8), length, 4 * plan.dp, MEMORY_RULES)
    return found.largest.allocated / 2**30


def memory(kind: str) -> Iterator[tuple[Pair, float]]:
    """GiB of the largest rank for the rows of a kind, and the size of SimuMax's error."""
    for model, sizes, length, measured, theirs in MEMORY[kind]:
        name = f"{type(model).__name__} {model.hidden_size} {sizes} {length}"
        yield Pair(name, measured, gibibytes(model, sizes, length)), abs(theirs) / 100


MODELS = {"70B": LLAMA_70B, "405B": LLAMA_405B}
Step: TypeAlias = tuple[str, int, int, int, int, int, dict[int, tuple[float, float]]]
STEPS: list[
    Step
] = [  # model, tp, pp, dp, cp, tokens, and by microbatches of a data rank milliseconds and SimuMax's error
    ("70B", 1, 2, 4, 1, 4096, {4: (843.0, -1.69), 8: (1476.8, -2.41), 32: (5436.5, -5.90)}),
    ("70B", 2, 1, 4, 1, 4096, {4: (725.5, -3.68), 8: (1387.0, -5.57), 32: (5376.5, -7.45)}),
    ("70B", 4, 1, 2, 1, 4096, {4: (409.8, -3.56), 8: (765.6, -2.34), 32: (2964.6, -3.45)}),
    ("70B", 8, 1, 1, 1, 4096, {4: (280.9, -8.97), 8: (556.7, -11.37), 32: (2073.7, -7.44)}),
    ("405B", 1, 2, 4, 1, 4096, {4: (1074.6, -0.18), 8: (1935.4, -3.34), 32: (7046.4, -5.49)}),
    ("405B", 2, 1, 4, 1, 4096, {4: (907.3, -5.13), 8: (1716.8, -6.78), 32: (6604.1, -8.56)}),
    ("405B", 4, 1, 2, 1, 4096, {4: (476.0, -4.85), 8: (899.6, -5.86), 32: (3455.4, -7.08)}),
    ("405B", 8, 1, 1, 1, 4096, {4: (258.8, -1.15), 8: (488.1, -0.26), 32: (1901.8, -1.54)}),
    ("70B", 2, 1, 1, 4, 32768, {4: (1758.0, -9.27)}),
    ("70B", 1, 1, 1, 8, 32768, {4: (1768.1, -7.97)}),
    ("70B", 2, 1, 1, 4, 131072, {4: (11315.7, -5.70)}),
    ("70B", 1, 1, 1, 8, 131072, {4: (11301.9, -6.96)}),
    ("405B", 2, 1, 1, 4, 32768, {4: (1984.7, -8.59)}),
    ("405B", 1, 1, 1, 8, 32768, {4: (2003.6, -5.36)}),
    ("405B", 2, 1, 1, 4, 131072, {4: (10577.6, -5.05)}),
]
CALIBRATION = {(0, 32): "products", (3, 32): "inside", (11, 4): "attention"}


def step_plan(row: Step, num_microbatches: int) -> Plan:
    """The plan of a row of steps."""
    name, tp, pp, dp, cp, *_ = row
    return Plan(
        pp=pp, tp=tp, dp=dp, cp=cp, zero=int(dp * cp > 1), num_microbatches=num_microbatches, precision="bfloat16",
        sequence_parallel=tp > 1, layers=(MODELS[name].num_layers // pp,) * pp,
    )  # fmt: skip


STEP_RULES = replace(MEGATRON_TIME, tensor_hidden=0.0)


def milliseconds(row: Step, num_microbatches: int, products: float, inside: float, attention: float) -> float:
    """A step on a machine with three numbers: parts of the products' peak, of NVLink, of attention's quoted part."""
    plan, (name, *_, length, _) = step_plan(row, num_microbatches), row
    return _milliseconds(MODELS[name], plan, length, products, inside, attention)


def _milliseconds(model: Model, plan: Plan, length: int, products: float, inside: float, attention: float) -> float:
    cluster = with_inside(with_products(Cluster.of("b200", 8), products), inside)
    rules = with_attention(STEP_RULES, attention)
    return StepTimer(model, plan, cluster, length, plan.num_microbatches * plan.dp, rules).result.seconds * 1e3


def plain_seconds(row: Step, num_microbatches: int) -> float:
    """A step by the table of accelerators, without a number of this machine."""
    plan, length = step_plan(row, num_microbatches), row[5]
    batch = num_microbatches * plan.dp
    return step_time(MODELS[row[0]], plan, Cluster.of("b200", 8), length, batch, STEP_RULES).seconds


@cache
def machine() -> dict[str, float]:
    """The three numbers at which the calibration points are met."""
    found = {"products": 0.5, "inside": 0.6, "attention": 1.0}
    for _ in range(3):
        for (index, count), name in CALIBRATION.items():
            row = STEPS[index]

            def of(part: float, row: Step = row, count: int = count, name: str = name) -> float:
                return milliseconds(row, count, **(found | {name: part}))

            found[name] = solve(of, row[6][count][0], 0.1, 1.5 if name == "attention" else 1.0)
    return found


def steps() -> Iterator[tuple[Pair, float]]:
    """Milliseconds of all rows, and the size of SimuMax's error."""
    for index, row in enumerate(STEPS):
        for count, (measured, theirs) in row[6].items():
            name = " ".join(map(str, (*row[:6], "m", count)))
            found = milliseconds(row, count, **machine())
            yield Pair(name, measured, found, (index, count) in CALIBRATION), abs(theirs) / 100


EXPERT_STEPS: list[
    dict[int, tuple[float, float]]
] = [  # of the rows of memory with experts, in their order; as in STEPS
    {4: (366.6, -6.28), 8: (676.2, -6.74), 32: (2721.3, -13.54)},
    {4: (282.1, -10.70), 8: (492.6, -11.66), 32: (1727.7, -11.18)},
    {4: (603.2, -3.03), 8: (1101.7, -4.28), 32: (4141.2, -6.50)},
    {4: (452.2, 0.06), 8: (771.6, -1.25), 32: (2718.6, -3.66)},
]


def expert_steps() -> Iterator[tuple[Pair, float]]:
    """Milliseconds of the rows with experts on the machine of the dense ones, and the size of SimuMax's error."""
    for (model, sizes, length, *_), runs in zip(MEMORY["experts"], EXPERT_STEPS, strict=True):
        for count, (measured, theirs) in runs.items():
            plan = replace(memory_plan(model, sizes), num_microbatches=count)
            found = _milliseconds(model, plan, length, **machine())
            name = f"{'V2' if model is V2 else 'V3'} {sizes} m {count}"
            yield Pair(name, measured, found), abs(theirs) / 100


def per_microbatch(pairs: Sequence[Pair]) -> list[Pair]:
    """What each further microbatch takes, from 4 to 8 of them: without all that a step does once.

    Args:
        pairs: of 4, 8 and 32 microbatches, plan by plan.
    """
    return [
        Pair(one.name, (other.published - one.published) / 4, (other.estimated - one.estimated) / 4)
        for one, other in zip(pairs[::3], pairs[1::3], strict=True)
    ]
