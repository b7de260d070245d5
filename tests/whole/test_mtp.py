"""A second token: loss and gradients of one process on every axis and schedule; what is shifted, what is refused."""

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from stage_runs import LATENT, V3, batch, build, check_cuts, launch

import dualpipe_lab as lab
from dualpipe_lab.models.mtp import next_tokens
from dualpipe_lab.models.stage_rules import check_stages, stage_layers

WEIGHT = {"mtp": 0.3}
KINDS = ("dualpipe", "zero_bubble_h1", "interleaved", "1f1b", "dualpipev")
MANY = WEIGHT | {"sequence_parallel": True, "recompute": True}
CUTS = {  # by number of ranks
    2: {
        "dp": (V3, [("dp", 2)], ("gpipe",), WEIGHT),
        "tp": (V3, [("tp", 2)], ("gpipe",), WEIGHT),
        "sequence parallel": (V3, [("tp", 2)], ("gpipe",), MANY),
        "loss in chunks": (V3, [("pp", 2)], ("1f1b",), WEIGHT | {"loss_chunk": 5}),
        "ep": (V3, [("ep", 2)], ("gpipe",), WEIGHT),
        "edp": (V3, [("dp", 2)], ("gpipe",), WEIGHT | {"edp": 1}),
        "latent": (LATENT, [("tp", 2)], ("gpipe",), WEIGHT | {"sequence_parallel": True}),
        "latent, cp": (LATENT, [("cp", 2)], ("gpipe",), WEIGHT | {"layout": "zigzag"}),
        "latent, pp": (LATENT, [("pp", 2)], KINDS[:2], WEIGHT),
        "contiguous": (V3, [("cp", 2)], ("gpipe",), WEIGHT | {"layout": "contiguous"}),
        "pp": (V3, [("pp", 2)], KINDS, WEIGHT),
    },
    4: {
        "tp": (V3, [("pp", 2), ("tp", 2)], KINDS[:3], MANY),
        "cp": (V3, [("cp", 2), ("pp", 2)], KINDS[2:], WEIGHT | {"layout": "striped"}),
        "ep": (V3, [("pp", 2), ("ep", 2)], KINDS[:3], WEIGHT),
        "dp": (V3, [("dp", 2), ("pp", 2)], KINDS[::3], WEIGHT | {"edp": 1, "layers": (0, 5)}),
    },
}


def test_every_cut_has_the_gradients_of_one_process(some):
    for cuts in CUTS.values():
        check_cuts(some(cuts, 2))


def test_the_last_stage_says_what_it_needs_and_leaves_the_second_token_out_of_evaluation():
    def fn(rank, world_size):
        model = build(V3, lab.Mesh(lab.Topology([("dp", 1)])), None, **WEIGHT)
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


def test_a_weight_that_cannot_be_is_refused_before_any_process_starts():
    for weight in (0.0, inf, nan):
        with pytest.raises(ValueError, match=f"a finite weight above 0, got mtp={weight}"):
            check_stages(V3, lab.Topology([("pp", 1)]), mtp=weight)


def test_shifts_need_two_tokens_and_equal_shapes():
    for ids, targets in ((torch.zeros(2, 1), torch.zeros(2, 1)), (torch.zeros(2, 3), torch.zeros(2, 4))):
        with pytest.raises(ValueError, match="with 2 tokens or more, got"):
            next_tokens(ids, targets)


def test_the_last_stage_has_fewer_layers_for_the_work_of_the_second_token():
    config = replace(V3, num_layers=8, num_dense_layers=0, vocabulary_size=1)
    assert [len(layers) for layers in stage_layers(config, 2)] == [4, 4]
    assert [len(layers) for layers in stage_layers(config, 2, mtp=True)] == [5, 3]
