"""A second token: loss and gradients of one process on every axis and schedule; what is shifted, what is refused."""

from dataclasses import replace
from functools import cache
from math import inf, nan, prod

import pytest
import torch
from stage_runs import SEED, assert_exact, batch, bias_of, build, launch, routers, step, worst

import dualpipe_lab as lab
from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.cp.sequence import shard_sequence
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.mtp import next_tokens
from dualpipe_lab.models.plain_v3_moe import PlainMTP
from dualpipe_lab.models.stage_rules import check_stages, stage_layers
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp import schedules
from dualpipe_lab.tp.latent_sizes import LatentSizes
from dualpipe_lab.tp.shard import initialize_parameters

WEIGHT = 0.3
V3 = V3MoEConfig(
    vocabulary_size=19, hidden_size=8, num_layers=5, num_heads=2, num_kv_heads=1, ffn_size=10, expert_ffn_size=6,
    balance=0.3,
)  # fmt: skip
LATENT = replace(V3, latent=LatentSizes(query_rank=6, kv_rank=5, content=4, position=2, value=3))


def plain_second(config):
    """The full model in plain torch, drawn by name, with biases."""
    model = PlainMTP(config, WEIGHT, torch.float64)
    initialize_parameters(model, SEED)
    for number, router in [*routers(model), (V3.num_layers, model.mtp["layer"].mlp.router)]:
        router.selection_bias = bias_of(number, V3.num_experts)
    return model


@cache
def plain(config, num_microbatches, num_data):
    model = plain_second(config)
    loss = model.loss(*(tensor.flatten(0, 2) for tensor in batch(V3.vocabulary_size, num_microbatches, num_data)))
    loss.backward()
    return {"loss": loss.detach()} | {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }


def runs(axes, names=("1f1b",), edp=None, num_microbatches=4, config=V3, **options):
    """In a rank: the worst error of each schedule."""
    torch.manual_seed(lab.comm.get_rank())
    mesh = lab.Mesh(lab.Topology(axes, edp=edp))
    num_data = prod(size for axis, size in axes if axis in ("dp", "ep"))
    expected, found = plain(config, num_microbatches, num_data), {}
    for name in names:
        program = schedules.build(name, mesh.size("pp"), num_microbatches)
        model = build(config, mesh, program, mtp=WEIGHT, **options)
        for stage in model.stages.values():
            if hasattr(stage, "mtp"):
                stage.mtp.layer.mlp.router.bias.copy_(bias_of(V3.num_layers, V3.num_experts))
        found[name] = worst(step(model), expected)
    return found


CUTS = {
    "dp": ([("dp", 2)], ("gpipe",), {}),
    "tp": ([("tp", 2)], ("gpipe",), {}),
    "sequence parallel": ([("tp", 2)], ("gpipe",), {"sequence_parallel": True, "recompute": True}),
    "loss in chunks": ([("pp", 2)], ("1f1b",), {"loss_chunk": 5}),
    "ep": ([("ep", 2)], ("gpipe",), {}),
    "edp": ([("dp", 2)], ("gpipe",), {"edp": 1}),
    "latent": ([("tp", 2)], ("gpipe",), {"config": LATENT, "sequence_parallel": True}),
    "latent, cp": ([("cp", 2)], ("gpipe",), {"config": LATENT, "layout": "zigzag"}),
    "latent, pp": ([("pp", 2)], ("zero_bubble_h1", "dualpipe"), {"config": LATENT}),
    "zigzag": ([("cp", 2)], ("gpipe",), {"layout": "zigzag"}),
    "contiguous": ([("cp", 2)], ("gpipe",), {"layout": "contiguous"}),
    "pp": ([("pp", 2)], ("1f1b", "zero_bubble_h1", "interleaved", "dualpipe", "dualpipev"), {}),
}


def run_cuts(cuts):
    return {
        (cut, name): error
        for cut, (axes, names, options) in cuts.items()
        for name, error in runs(axes, names, **options).items()
    }


def test_every_axis_has_the_gradients_of_one_process(some):
    cuts = some(CUTS, 2)

    def fn(rank, world_size):
        return run_cuts(cuts)

    launched = launch(fn, 2)
    assert_exact(launched)
    assert len(launched[0]) == sum(len(names) for _, names, _ in cuts.values())


def test_two_axes_have_the_gradients_of_one_process(some, amount):
    kinds = ("dualpipe", "zero_bubble_h1", "interleaved", "1f1b", "dualpipev")[: amount(5, 3)]
    cuts = {
        "tp": ([("pp", 2), ("tp", 2)], kinds, {"sequence_parallel": True, "recompute": True}),
        "cp": ([("cp", 2), ("pp", 2)], kinds, {"layout": "striped"}),
        "ep": ([("pp", 2), ("ep", 2)], kinds, {}),
        "dp": ([("dp", 2), ("pp", 2)], ("1f1b", "dualpipe"), {"edp": 1, "layers": (0, 5)}),
    }
    cuts = some(cuts, 2)

    def fn(rank, world_size):
        return run_cuts(cuts)

    assert_exact(launch(fn, 4))


def test_the_last_stage_says_what_it_needs_and_leaves_the_second_token_out_of_evaluation():
    def fn(rank, world_size):
        model = build(V3, lab.Mesh(lab.Topology([("dp", 1)])), None, mtp=WEIGHT)
        ids = batch(V3.vocabulary_size, 1)[0][0, 0]
        targets = ids.roll(-1, -1)
        stage, shifted = model.stages[0], next_tokens(ids, targets)
        with pytest.raises(ValueError, match=r"got none; pass extra=rank_model.extra_inputs"):
            model(ids)
        with pytest.raises(ValueError, match="call begin_step first"):
            stage(ids, *shifted)
        pieces = lab.ep.overlap.overlappable_stage(stage, 0)
        with pytest.raises(ValueError, match=r"got none; pass extra=rank_model.extra_inputs"):
            pieces.forward(0, (ids,))
        with pytest.raises(ValueError, match="stage 0 takes next_ids and next_targets beside x, got text"):
            pieces.forward(0, (ids,), {"text": ids})
        with pytest.raises(ValueError, match="call begin_step first"):
            pieces.forward(0, (ids,), shifted._asdict(), lambda logits: logits.sum())
        stage.eval()
        with torch.no_grad():
            (output,) = pieces.forward(0, (ids,)).output
            assert torch.equal(output, model(ids)), "the extra layer does not run"
        assert torch.equal(model(ids), build(V3, model.mesh, None)(ids)), "the weights of the model without it"
        model.begin_step(ids.numel(), len(ids))
        stage.config = replace(V3, balance=0.0)
        losses = []
        for last in (0, 7):  # no target, and no other position sees it
            shifted.next_ids[:, -1] = last
            losses.append(stage(ids, *shifted).loss)
        assert torch.equal(*losses)
        shifted.next_ids[:, -2] = 7
        assert not torch.equal(stage(ids, *shifted).loss, losses[0])

    launch(fn, 1)


def test_shards_that_are_shifted_themselves_lose_targets():
    ids, targets = torch.arange(8), torch.arange(1, 9)
    layout = make_layout("zigzag", 8, 2)
    right = [shard_sequence(x, layout, 0, dim=-1).tolist() for x in next_tokens(ids, targets)]
    wrong = [x.tolist() for x in next_tokens(*(shard_sequence(x, layout, 0, dim=-1) for x in (ids, targets)))]
    assert right == [[1, 2, 7, 0], [2, 3, 8, -100]]
    assert wrong == [[1, 6, 7, 0], [2, 7, 8, -100]], "after token 1 it predicts token 7 from token 6"


@pytest.mark.parametrize(
    ("config", "axes", "weight", "message"),
    [
        (LlamaConfig(), [("pp", 1)], 0.3, "by a V3-style model, got a LlamaConfig; leave out mtp"),
        (V3, [("pp", 1)], 0.0, "a finite weight above 0, got mtp=0.0"),
        (V3, [("pp", 1)], inf, "got mtp=inf"),
        (V3, [("pp", 1)], nan, "got mtp=nan"),
        (replace(V3, hidden_size=9, num_heads=2, head_size=2), [("tp", 2)], 0.3, "got 9 on 2; use a size that divides"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(config, axes, weight, message):
    with pytest.raises(ValueError, match=message):
        check_stages(config, lab.Topology(axes), mtp=weight)


def test_shifts_need_two_tokens_and_equal_shapes():
    for ids, targets in ((torch.zeros(2, 1), torch.zeros(2, 1)), (torch.zeros(2, 3), torch.zeros(2, 4))):
        with pytest.raises(ValueError, match="with 2 tokens or more, got"):
            next_tokens(ids, targets)


def test_the_last_stage_has_fewer_layers_for_the_work_of_the_second_token():
    config = replace(V3, num_layers=8, num_dense_layers=0, vocabulary_size=1)
    assert [len(layers) for layers in stage_layers(config, 2)] == [4, 4]
    assert [len(layers) for layers in stage_layers(config, 2, mtp=True)] == [5, 3]
