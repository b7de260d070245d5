"""Which layers a stage has, and what is refused before any process starts."""

from dataclasses import replace
from math import nan

import pytest
import torch
from stage_runs import LENGTH, SEED, batch, launch

import dualpipe_lab as lab
from dualpipe_lab.models.llama import Llama
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.rank_model import build_stages
from dualpipe_lab.models.stage_rules import check_stages, stage_layers, stages_of
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp import schedules

LLAMA, V3 = LlamaConfig(num_layers=6), V3MoEConfig(num_layers=6)
PP1, PP2 = [("pp", 1)], [("pp", 2)]


def sizes(config, num_stages, layers=None):
    return [len(share) for share in stage_layers(config, num_stages, layers)]


def test_layers_are_shared_out_by_their_work():
    assert sizes(LLAMA, 1) == [6]
    assert sizes(LLAMA, 3) == [2, 2, 2]
    assert sizes(replace(LLAMA, vocabulary_size=2 * LLAMA.layer_costs[0] // 64), 2) == [4, 2], (
        "the head is as two layers"
    )
    assert sizes(replace(V3, ffn_size=1000, vocabulary_size=1), 2) == [1, 5], "a dense layer of five times the work"
    assert sizes(LLAMA, 3, (0, 6, 0)) == [0, 6, 0]
    assert stage_layers(LLAMA, 2, (1, 5)) == (range(1), range(1, 6))
    assert [stages_of(schedules.zbv(2, 4), rank) for rank in range(2)] == [(0, 3), (1, 2)]


def test_what_cannot_be_is_refused_before_any_process_starts(subtests):
    for config, axes, program, options, message in [
        (
            replace(LLAMA, num_layers=3),
            PP2,
            schedules.interleaved(2, 4),
            {},
            "got 3 layers for 4 stages; use at",
        ),
        (LLAMA, PP2, schedules.gpipe(2, 2), {"layers": (3, 4)}, r"6 in all, got \(3, 4\); leave them out for \(3, 3\)"),
        (LLAMA, PP2, schedules.zbv(2, 4), {"layers": (3, 0, 0, 3)}, "from 1 between the ends"),
        (LLAMA, PP2, schedules.gpipe(2, 2), {"layers": (6,)}, "for each of 2 stages"),
        (LLAMA, PP2, None, {}, "got no program in pp 2 = 2 ranks; build it for 2"),
        (LLAMA, PP2, schedules.gpipe(4, 2), {}, "got GPipe for 4 in pp 2 = 2 ranks; build it for 2"),
        (LLAMA, [("dp", 2)], schedules.gpipe(2, 2), {}, "GPipe for 2 in dp 2 = 2 ranks; build it for 1"),
        (LLAMA, [("ep", 2)], None, {}, "a Llama has no experts to shard, got ep 2"),
        (replace(V3, num_experts_per_token=9), PP1, None, {}, "1..8 of 8 experts, got num_experts_per_token=9"),
        (replace(V3, expert_ffn_size=0), PP1, None, {}, "a width of at least 1, got balance=.* expert_ffn_size=0"),
        (replace(V3, balance=nan), PP1, None, {}, "got balance=nan"),
        (replace(LLAMA, rope_base=0.0), PP1, None, {}, "a rope_base above 0"),
        (V3, [("tp", 2)], None, {"sequence_parallel": True, "num_tokens": 5}, "got 5 tokens on 2 ranks; pad it to 6"),
    ]:
        with (
            subtests.test(config=config, axes=axes, program=program, options=options, message=message),
            pytest.raises(ValueError, match=message),
        ):
            check_stages(config, lab.Topology(axes), program, **options)


def test_what_can_be_is_not_refused():
    check_stages(V3, lab.Topology([*PP2, ("dp", 4)], edp=2), schedules.dualpipe(2, 4))
    check_stages(LLAMA, lab.Topology([*PP2, ("tp", 2)]), schedules.zbv(2, 4), sequence_parallel=True, num_tokens=6)


def test_one_stage_is_the_model_and_others_say_what_they_lack():
    def fn(rank, world_size):
        config, mesh = replace(LLAMA, tied=True), lab.Mesh(lab.Topology([("dp", 1)]))
        model, ids = build_stages(config, mesh, seed=SEED), batch(config.vocabulary_size, 1)[0][0, 0]
        assert model.tied is None
        assert torch.equal(model(ids), Llama(config, mesh, seed=SEED)(ids))
        cut = build_stages(config, mesh, schedules.interleaved(1, 2), seed=SEED)
        assert cut.tied == {0: "embedding.weight", 1: "head.weight"}
        with pytest.raises(ValueError, match="the model has 2 stages; run them with PipelineRuntime"):
            cut(ids)
        with pytest.raises(ValueError, match="the last stage has the head"):
            cut.stages[0].loss_of(ids, ids)
        with pytest.raises(ValueError, match="share a sequence along cp 1, got layout=<zigzag"):
            build_stages(config, mesh, layout=lab.cp.make_layout("zigzag", LENGTH, 2))

    launch(fn, 1)
