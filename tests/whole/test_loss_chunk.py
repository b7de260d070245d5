"""Models whose loss is in chunks: gradients of one process on every kind of cut, training with it, no whole logits."""

from dataclasses import replace

import pytest
from runs import Made
from stage_runs import LENGTH, ROWS, TIED, V3, batch, build, check_cuts, launch

import dualpipe_lab as lab
from dualpipe_lab import dp
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


def test_a_head_that_zero_3_has_freed_is_refused_instead_of_read_as_nan():
    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("dp", 2)]))
        ids = batch(TIED.vocabulary_size, 1)[0][0, 0]
        with pytest.raises(ValueError, match="at least 1, got 0; use 1024"):
            build_stages(V3, mesh, loss_chunk=0)
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
