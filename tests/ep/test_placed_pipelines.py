"""Placed experts in a pipeline: forwards alone under both policies, and a step, also with overlapped experts."""

import torch
from ep_runs import distance
from runs import A1, launch

import dualpipe_lab as lab
from dualpipe_lab.ep.deepseek_moe import DeepSeekMoE
from dualpipe_lab.ep.eplb import ExpertPlacement, rebalance_experts
from dualpipe_lab.ep.moving_experts import full_experts
from dualpipe_lab.ep.overlap import interruptible_stage, overlapped_forward_backward
from dualpipe_lab.ep.placed_experts import place_experts
from dualpipe_lab.models.rank_model import build_stages
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime import PipelineRuntime

CONFIG = V3MoEConfig(
    vocabulary_size=19, hidden_size=8, num_layers=4, num_dense_layers=0, num_heads=2, num_kv_heads=1,
    num_groups=2, num_groups_per_token=1, expert_ffn_size=6,
)  # fmt: skip
LOADS, MICROBATCHES = [[9.0, 1, 7, 1, 2, 5, 1, 3]], 4


def build(name, plan=None, num_nodes=1, overlaps=False):
    """The runtime of a rank of pp 2 x ep 2, its data and its layer of experts."""
    mesh = lab.Mesh(lab.Topology([("pp", 2), ("ep", 2)]))
    program = schedules.build(name, 2, MICROBATCHES)
    model = build_stages(CONFIG, mesh, program, dtype=torch.float64, num_nodes=num_nodes)
    layers = [m for m in model.modules() if isinstance(m, DeepSeekMoE)]
    if plan is not None:
        for layer in layers:
            place_experts(layer, plan)
    model.begin_step(2 * MICROBATCHES * 12, 2 * MICROBATCHES * 3)
    stages = {n: interruptible_stage(s, n) for n, s in model.stages.items()} if overlaps else model.stages
    options = {"overlapped": overlapped_forward_backward} if overlaps else {}
    runtime = PipelineRuntime(program, stages, model.loss_fn(), group=mesh.group("pp"), **options)
    generator = torch.Generator().manual_seed(mesh.rank("ep"))
    ids = torch.randint(19, (MICROBATCHES, 3, 4), generator=generator)
    return runtime, list(ids), layers


def gradients(name, plan, overlaps=False):
    """Losses of a step, and the gradients of all experts of this rank's stages."""
    runtime, ids, layers = build(name, plan, overlaps=overlaps)
    result = runtime.step(ids, [(x + 1) % 19 for x in ids], weights=[1.0] * MICROBATCHES)
    for layer in layers:
        layer.experts.sum_replicas()
    losses = [loss.detach() for _, loss in sorted(result.losses.items())]
    return losses + [grad for layer in layers for grad in full_experts(layer.experts, "grad").values()]


def test_forwards_and_steps_are_those_without_replicas():
    """Prefill by node with the hierarchical plan, decode with the global one; then 1F1B, and DualPipeV overlapped."""
    near, anywhere = (ExpertPlacement(*rebalance_experts(LOADS, 12, groups, 2, 2)) for groups in (2, 1))
    assert not torch.equal(near[0], anywhere[0])

    def fn(rank, world_size):
        runtime, ids, _ = build("gpipe")
        plain, worst = runtime.evaluate(ids).outputs, []
        for plan, num_nodes in ((near, 2), (anywhere, 1)):
            placed = build("gpipe", plan, num_nodes)[0].evaluate(ids).outputs
            assert placed.keys() == plain.keys()
            worst += [distance(placed[m], plain[m]) for m in plain]
        for name, overlaps in (("1f1b", False), ("dualpipev", True)):
            both = [gradients(name, plan, overlaps) for plan in (None, anywhere)]
            assert len(both[0]) == len(both[1]) > 0
            worst += [distance(b, a) for a, b in zip(*both, strict=True)]
        return worst

    for worst in launch(fn, 4):
        assert max(worst) <= A1
