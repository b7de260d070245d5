"""The list of sums: alike on all ranks of a sum, the plan's table of it, and what runs by it."""

import pytest
from runs import launch

import dualpipe_lab as lab
from dualpipe_lab.dp import ModelSpec
from dualpipe_lab.dp.sums import ParamSpec, sums_of
from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.models.rank_model import build_stages
from dualpipe_lab.pp.runtime import PipelineRuntime

TIED = LlamaConfig(num_layers=4, tied=True, num_heads=4, num_kv_heads=2, hidden_size=8, ffn_size=8)
V3 = V3MoEConfig(num_layers=4, num_heads=2, num_kv_heads=2, hidden_size=8, ffn_size=8, expert_ffn_size=4, balance=0.0)
PLANS = {
    "mirrors": (lab.Plan(pp=2, dp=2, tp=2, schedule="dualpipe", num_microbatches=4), TIED),
    "tied stages": (lab.Plan(pp=2, dp=2, tp=2, schedule="1f1b", num_microbatches=4), TIED),
    "experts": (lab.Plan(dp=2, ep=2, pp=2, num_microbatches=2), V3),
    "nodes": (lab.Plan(dp=4, zero=1, hybrid=True, ranks_per_node=2), V3),
    "experts in data": (lab.Plan(dp=4, ep=2, experts_in_data=True, zero=1), V3),
}
KINDS = {  # a part of a name: rows of the plan
    "embedding": ("tied embedding", "embedding"),
    "attention.q": ("attention", "queries and output"),
    "attention_norm": ("norms",),
    "router": ("router",),
    "experts": ("experts",),
}


@pytest.mark.parametrize("name", PLANS)
def test_ranks_of_a_sum_list_one_another_and_the_plan_prints_their_list(name):
    plan, config = PLANS[name]

    def fn(rank, world_size):
        mesh, program = lab.Mesh(plan.topology), plan.program or lab.Program.parse("one", ["0F0 0B0"])
        model = build_stages(config, mesh, program)
        spec = ModelSpec(model, mesh, plan.hybrid, program if plan.pp > 1 else None)
        runtime = PipelineRuntime(program, model.stages, model.loss_fn(), group=mesh.group("pp"))
        return spec.sums, [*runtime._replicated.mirrors.values()]

    found = launch(fn, plan.world_size)
    assert any(one.why.startswith(name.split()[0]) or one.why in ("replicas", "dp", "edp") for one in found[0][0])
    for rank, (sums, by_runtime) in enumerate(found):
        assert {(one.ranks, one.when) for one in by_runtime} == {
            (one.ranks, one.when) for one in sums if one.why == "mirrors"
        }
        for one in sums:
            assert rank in one.ranks
            assert all(one in found[other][0] for other in one.ranks)  # the same parameters, too
    for part, kinds in KINDS.items():
        for row in (row for row in plan.sums(config).rows if row.kind in kinds):
            mine = [one for one in found[0][0] if any(part in parameter for parameter in one.parameters)]
            stages = [one for one in mine if not one.when.endswith(tuple("123"))]  # of the first stage
            assert [(one.why, one.ranks) for one in stages] == [(one.why, one.ranks) for one in row.sums], part


def test_a_list_prints_one_line_per_sum():
    here = lab.Topology([("pp", 4), ("dp", 2)]).at(0)
    spec = ParamSpec("table", (4,), stage=0, holders=(0, 3), tied=(0, 2))
    assert list(map(str, sums_of([spec], here, {0: (0, 3), 2: (1, 2)}))) == [
        "mirrors: ranks 0 6 after the last backward of stage 0: table",
        "dp: ranks 0 1 in the backwards: table",
        "tied stages: ranks 0 2 4 6 after the backwards: table",
    ]
