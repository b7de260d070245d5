"""Models whose loss is in chunks: gradients of one process on every kind of cut, training with it, no whole logits."""

from dataclasses import replace

import pytest
from runs import Made
from stage_runs import LENGTH, ROWS, TIED, V3, batch, build, check_cuts, launch

import dualpipe_lab as lab
from dualpipe_lab import dp, train
from dualpipe_lab.models import Llama, LlamaConfig, build_stages

WIDE = LlamaConfig(vocabulary_size=256, num_layers=1, hidden_size=16, ffn_size=16, num_heads=2, num_kv_heads=2)


def test_every_cut_has_the_gradients_of_one_process():
    """Chunks of 5 tokens, of 36 in a microbatch; one microbatch has no target at all."""
    chunk = {"loss_chunk": 5}
    sharded = chunk | {"sequence_parallel": True, "recompute": True}
    cuts = [(TIED, [("pp", 2)], ("1f1b", "zero_bubble_h1", "dualpipe"), chunk)]
    cuts += [(V3, [("pp", 2)], ("interleaved", "dualpipev"), chunk)]
    cuts += [(config, [("tp", 2)], ("1f1b",), sharded) for config in (TIED, V3)]
    cuts += [(TIED, [("cp", 2)], ("1f1b",), chunk | {"layout": "zigzag"})]
    check_cuts(dict(enumerate(cuts)))


def test_no_step_makes_more_rows_of_logits_than_a_chunk_has():
    def fn(rank, world_size):
        found = []
        for chunk in (None, 17):  # more than the 16 rows of the transposed weight
            model = Llama(WIDE, lab.Topology([("tp", 2)]), loss_chunk=chunk)
            ids = batch(256, 1)[0][0, 0]
            with Made() as made:
                model.loss(ids, ids).backward()
            found.append(max(shape.numel() // 128 for shape in made.shapes if len(shape) > 1 and shape[-1] == 128))
            logits = model(ids) if chunk is None else model.logits_of(model(ids))
            found.append(tuple(logits.shape))
        return found

    whole = (ROWS, LENGTH, 128)
    assert launch(fn, 2) == [[ROWS * LENGTH, whole, 17, whole]] * 2


def test_a_training_in_chunks_follows_one_process_also_under_zero_3_and_evaluates():
    options = {
        "sequence_length": 16,
        "global_batch": 8,
        "lr": 1e-2,
        "evaluate_every": 2,
        "evaluation": lab.data.frozen_corpus("evaluation"),
        "sample": "A rank ",
        "sample_length": 6,
        "temperature": 0.0,
    }
    text = lab.data.frozen_corpus()
    config = LlamaConfig(hidden_size=16, ffn_size=32, num_layers=2, num_heads=2, num_kv_heads=2)

    def run(**fields):
        plan = lab.Plan(precision="float64", **fields)
        return train.run(config, plan, text, steps=3, timeout=240, log_every=0, **options)

    expected = run()
    for fields in ({"dp": 2, "zero": 3}, {"pp": 2, "num_microbatches": 2}):
        found = run(loss_chunk=5, **fields)
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)
        assert found.norms == pytest.approx(expected.norms, rel=1e-10)
        assert found.metrics[1].evaluation == pytest.approx(expected.metrics[1].evaluation, rel=1e-10)
        assert found.text == expected.text


def test_a_wrong_chunk_is_refused():
    with pytest.raises(ValueError, match="a plan needs loss_chunk to be an integer of at least 1, got 0"):
        lab.Plan(loss_chunk=0)

    def fn(rank, world_size):
        with pytest.raises(ValueError, match="at least 1, got 0; use 1024"):
            build_stages(V3, lab.Topology([("dp", 1)]), loss_chunk=0)

    launch(fn, 1)


def test_a_head_that_zero_3_has_freed_is_refused_instead_of_read_as_nan():
    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("dp", 2)]))
        ids = batch(TIED.vocabulary_size, 1)[0][0, 0]
        for config, has_units in ((TIED, False), (replace(TIED, tied=False), False), (replace(TIED, tied=False), True)):
            model = build(config, mesh, None, loss_chunk=5)
            stage = model.stages[0]
            parts = [stage.embedding, *stage.layers, stage.norm, stage.head]
            dp.Zero3(model, mesh, units=parts if has_units else [stage])
            output = stage(ids)
            if has_units:
                assert stage.loss_of(output, ids).isfinite()
            else:
                with pytest.raises(ValueError, match="ZeRO-3 has freed the unit that holds the head's weight"):
                    stage.loss_of(output, ids)

    launch(fn, 2)
