"""Memory of Megatron's own tests, their golden values, beside the estimate: states and peaks of 20 rows.

Chapter: book/whole/predictions.  Bytes of torch's allocator on the last rank, behind a step and at the peak.
What a release keeps is chosen by the date of the row: buffers for the gradients of experts and head came with
Transformer Engine 2.10 (October 2025) and Megatron core 0.14.
Source: NVIDIA/Megatron-LM, tests/functional_tests/test_cases, commit d98e8a64.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dualpipe_course.whole.published import Pair
from dualpipe_lab.models import V3MoEConfig
from dualpipe_lab.plan import MEGATRON, MEGATRON_DROPOUT, Cluster, GptConfig, KeepRules, Plan, RankMemory, estimate
from dualpipe_lab.tp import LatentSizes

GIB, MIB = 2**30, 2**20
ROWS = [  # test case, where it was measured, bytes behind a step and at the peak
    ("gpt/gpt3_7b_tp1_pp4_memory_speed", "dev_dgx_a100", 24510808064, 60489064448),
    ("gpt/gpt3_7b_tp1_pp4_memory_speed", "dev_dgx_gb200", 24540168192, 60519342080),
    ("gpt/gpt3_7b_tp1_pp4_memory_speed", "dev_dgx_h100", 24808996864, 60720852992),
    ("gpt/gpt3_7b_tp4_pp1_memory_speed", "dev_dgx_a100", 20634103808, 58188115968),
    ("gpt/gpt3_7b_tp4_pp1_memory_speed", "dev_dgx_gb200", 20663463936, 58217476096),
    ("gpt/gpt3_7b_tp4_pp1_memory_speed", "dev_dgx_h100", 20663519232, 57143791616),
    ("mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release", "dev_dgx_h100", 33395759104, 46128394240),
    ("mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release_sm", "dev_dgx_h100", 33393860608, 51399831552),
    ("mixtral/deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release", "dev_dgx_gb200", 58533773312, 100344504320),
    ("mixtral/deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release_sm", "dev_dgx_gb200", 58583740416, 121062998016),
    ("mixtral/mixtral_8x22b_tp2pp8ep8vpp1_release", "dev_dgx_h100", 23002929152, 28533706752),
    ("mixtral/mixtral_8x22b_tp2pp8ep8vpp1_release", "lts_dgx_a100", 22284785664, 28168466432),
    ("mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release", "dev_dgx_h100", 17703634944, 25603858432),
    ("mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release", "lts_dgx_a100", 17448753152, 25339500544),
    ("mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release_sm", "dev_dgx_h100", 17703634944, 27638417408),
    ("mixtral/mixtral_8x7b_tp1pp4ep8vpp8_release", "dev_dgx_h100", 19743387648, 35505844224),
    ("mixtral/mixtral_8x7b_tp1pp4ep8vpp8_release", "lts_dgx_a100", 19085930496, 35900022784),
    ("moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed", "dev_dgx_h100", 6632031744, 60111630336),
    ("moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed", "dev_dgxh100_dgxc", 6637274624, 57961472000),
    ("moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_selective_recompute_experimental", "dev_dgx_h100", 6025470464, 49211260928),
]  # fmt: skip
REPEATED_PARTS = frozenset({"layernorm", "mla_up_proj", "mlp", "moe_act"})  # of the row with recomputation
OLD = replace(MEGATRON, buffers_head=False, buffers_experts=False)  # before those releases


@dataclass(frozen=True)
class Case:
    """A configuration: model, plan, rules of its rows by where they were measured, shape of the step.

    Attributes:
        cublas: its CUBLAS_WORKSPACE_CONFIG.
        old: its rows that were written before October 2025.
        is_given: the number of ranks is in the test's recipe; else it is that whose states are nearest to the measured.
    """

    model: GptConfig | V3MoEConfig
    plan: Plan
    rules: KeepRules
    length: int = 4096
    rows: int = 1
    cublas: str = ""
    old: tuple[str, ...] = ()
    is_given: bool = True

    def estimate(self, gold: str, other: Plan | None = None) -> RankMemory:
        """The memory of the last rank, where a row was measured."""
        plan = other or self.plan
        rules = replace(OLD, experts=self.rules.experts) if gold in self.old else self.rules
        rules = with_workspaces(rules, gold.split("_")[-1], self.cublas)
        num_rows = self.rows * plan.data_size * plan.num_microbatches
        cluster = Cluster.of("h100", plan.world_size)
        return estimate(self.model, plan, cluster, self.length, num_rows, rules).of(plan.world_size - 1)


def _mixtral(vocabulary: int, hidden: int, ffn: int, num_layers: int, num_heads: int) -> V3MoEConfig:
    return V3MoEConfig(
        vocabulary, hidden, num_layers, 0, num_heads, 8, ffn_size=ffn, expert_ffn_size=ffn, num_groups=1,
        num_groups_per_token=1, num_shared_experts=0, scoring="softmax", selection_bias=False,
    )  # fmt: skip


def _deepseek(
    vocabulary: int, hidden: int, num_layers: int, num_dense: int, num_heads: int, ffn: int, expert_ffn: int,
    num_experts: int, k: int,
) -> V3MoEConfig:  # fmt: skip
    return V3MoEConfig(
        vocabulary, hidden, num_layers, num_dense, num_heads, ffn_size=ffn, expert_ffn_size=expert_ffn,
        num_experts=num_experts, num_experts_per_token=k, num_groups=1, num_groups_per_token=1, latent=LatentSizes(),
    )  # fmt: skip


def plan_of(
    pp: int, dp: int, layers: tuple[int, ...] | None, num_microbatches: int, ep: int = 1, chunks: int | None = None,
    **fields: Any,
) -> Plan:  # fmt: skip
    """A plan as Megatron trains it: ZeRO-1 in bf16, 1F1B or interleaved."""
    schedule = "interleaved" if chunks else "1f1b"
    shared: dict[str, Any] = {
        "zero": 1,
        "precision": "bfloat16",
        "experts_in_data": ep > 1,
        "schedule": schedule,
        "chunks": chunks,
    }
    return Plan(
        pp=pp, dp=dp, layers=layers, num_microbatches=num_microbatches, ep=ep, **shared, **fields
    )  # fmt: skip


def _spread(*sizes: Any, **fields: Any) -> Plan:
    """A plan with tp 2, whose ranks share out the experts: `ep` is that of Megatron divided by 2."""
    return plan_of(*sizes, tp=2, sequence_parallel=True, **fields)


SEVEN_B: dict[str, Any] = {"num_kv_heads": 8, "num_positions": 8192, "tied": False}
MIXTRAL_7B = _mixtral(32000, 4096, 14336, 32, 32)
PROXY = _deepseek(258560, 7168, 14, 3, 128, 18432, 2048, 64, 8)
EIGHT = (2,) * 6 + (1, 1)
LTS = "lts_dgx_a100"
CASES: dict[str, Case] = {
    "gpt/gpt3_7b_tp4_pp1_memory_speed": Case(
        GptConfig(131584, 4096, 32, 32, **SEVEN_B), plan_of(1, 2, None, 2, tp=4), MEGATRON_DROPOUT, 8192, 2, ":4096:8"
    ),
    "gpt/gpt3_7b_tp1_pp4_memory_speed": Case(
        GptConfig(131200, 4096, 32, 32, **SEVEN_B), plan_of(4, 2, (1,) * 32, 4, chunks=8), MEGATRON_DROPOUT, 8192, 1,
        ":4096:8",
    ),
    "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed": Case(
        _deepseek(51712, 1024, 16, 1, 32, 4096, 1024, 32, 4), _spread(2, 2, (2,) * 8, 4, 2, 4, multi_token=0.1),
        replace(MEGATRON, core="unfused"), rows=4,
    ),
    "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_selective_recompute_experimental": Case(
        _deepseek(51712, 1024, 16, 3, 32, 4096, 1024, 32, 4),
        _spread(2, 2, (3, 2, 2, 2, 2, 2, 2, 1), 4, 2, 4, multi_token=0.1),
        replace(MEGATRON, core="unfused", recomputes=REPEATED_PARTS), rows=4,
    ),
    "mixtral/mixtral_8x7b_tp1pp4ep8vpp8_release": Case(
        MIXTRAL_7B, _spread(4, 8, (1,) * 32, 32, 4, 8), MEGATRON, old=(LTS,), is_given=False
    ),
    "mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release": Case(
        replace(MIXTRAL_7B, vocabulary_size=256000), _spread(4, 16, (8,) * 4, 64, 4),
        replace(MEGATRON, experts="sharded"), old=(LTS, "dev_dgx_h100"), is_given=False,
    ),
    "mixtral/mixtral_8x22b_tp2pp8ep8vpp1_release": Case(
        _mixtral(32000, 6144, 16384, 56, 48), _spread(8, 16, (7,) * 8, 16, 4), MEGATRON, old=(LTS,), is_given=False
    ),
    "mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release": Case(
        PROXY, _spread(4, 8, EIGHT, 64, 8, 2, multi_token=0.1), MEGATRON, is_given=False
    ),
    "mixtral/deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release": Case(
        PROXY, _spread(2, 8, (7, 7), 16, 4, multi_token=0.1), MEGATRON, rows=4, is_given=False
    ),
}  # fmt: skip


def case_of(name: str) -> Case | None:
    """The configuration of a test case."""
    return CASES.get(name.removesuffix("_sm"))


def pairs(experts: bool) -> Iterator[tuple[Pair, Pair]]:
    """GiB of the states and of the peak, of the rows with experts or of the others."""
    for name, gold, held, peak in ROWS:
        case = CASES[name.removesuffix("_sm")]
        if isinstance(case.model, V3MoEConfig) == experts:
            found = case.estimate(gold)
            yield (
                Pair(f"{name}, {gold}", held / GIB, found.behind_step / GIB),
                Pair(f"{name}, {gold}", peak / GIB, found.allocated / GIB),
            )


def with_workspaces(rules: KeepRules, accelerator: str, config: str = "") -> KeepRules:
    """Return Megatron's rules with the workspaces of an accelerator, given the row's CUBLAS_WORKSPACE_CONFIG.

    cuBLAS has one for the forward's thread and one for the backward's: `:4096:8` is eight of 4096 KiB; torch's default
    32 MiB since H100, and before `:4096:2:16:8`.  Transformer Engine has one, 32 MiB since H100 and before 4 MiB, and
    one more for each of four streams of experts' products.
    """
    is_old = accelerator == "a100"
    engine = (4 if is_old else 32) * MIB
    each = 8 * 4096 * 1024 if config == ":4096:8" else (2 * 4096 + 8 * 16) * 1024 if is_old else 32 * MIB
    return replace(rules, workspace_bytes=2 * each + engine, expert_workspace_bytes=4 * engine)
