"""Messages of the runtime: how many buffers stand ready, and how ranks agree on shapes."""

import pytest
from rank_runs import bitwise, expected_grads, grads_of, make_batch, make_stages, run_all
from schedule_grid import num_crossings
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.runtime import PipelineRuntime
from dualpipe_lab.pp.runtime.rank_plan import choose_lookahead
from dualpipe_lab.pp.schedules import build

NAMES = ["1f1b", "zero_bubble_h1", "interleaved", "dualpipev", "dualpipe"]


def check(program, ranks, batch, weights=None):
    expected, _ = expected_grads(program, batch, weights)
    for (grads, *_), theirs in zip(ranks, expected, strict=True):
        assert all(bitwise(grads[stage], theirs[stage]) for stage in grads), program


def test_buffers_and_activations_do_not_grow_with_the_number_of_microbatches():
    programs = [build(name, 4, number) for name in NAMES for number in (8, 12, 24)]
    _, results = run_all(programs, 4)
    for program, ranks in zip(programs, results, strict=True):
        peaks = [lab.simulate(program).peak_activations(rank) for rank in range(4)]
        assert [activations for _, _, activations, *_ in ranks] == peaks
    by_name = [[[buffers for *_, buffers, _ in ranks] for ranks in results[i : i + 3]] for i in range(0, 15, 3)]
    for few, more, many in by_name:
        assert more == many
        assert max(many) <= 2 * 4  # two ahead, from two neighbours, downwards and upwards
        assert all(a <= b for a, b in zip(few, many, strict=True))


@pytest.mark.on_gloo("NCCL has no tags, so the runtime prefetches nothing there")
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_lookahead_changes_no_result(lookahead):
    programs = [build(name, 2, 4) for name in ("gpipe", "dualpipe", "zbv")]
    _, results = run_all(programs, 2, lookahead=lookahead)
    for program, ranks in zip(programs, results, strict=True):
        check(program, ranks, make_batch(4))


def test_no_receive_is_prefetched_where_messages_have_no_tags():
    assert [choose_lookahead(asked, in_order=True) for asked in (None, 0)] == [0, 0]
    with pytest.raises(ValueError, match=r"NCCL has no tags.*got lookahead=2; use lookahead=0 or None"):
        choose_lookahead(2, in_order=True)


def test_shapes_are_inferred():
    """Microbatches of three sizes, one of them first seen in the middle; weighted by their rows."""
    rows = [3, 3, 1, 3, 2, 1, 3, 3]
    weights = [size / sum(rows) for size in rows]
    programs = [build(name, 2, 8) for name in (*NAMES, "zbv", "easy_dualpipe")]
    batch = make_batch(8, rows=rows)
    out, results = run_all(programs, 2, [batch] * len(programs), [weights] * len(programs), boundary=None)
    for program, ranks in zip(programs, results, strict=True):
        check(program, ranks, batch, weights)
    assert out.ledger.count("isend") == out.ledger.count("irecv")


def test_a_header_is_sent_once_per_shape_and_signatures_once_per_step():
    program, stages = build("1f1b", 4, 4), make_stages(4)
    steps = [[3, 3, 3, 3], [3, 3, 3, 3], [3, 3, 2, 2], [2, 3, 2, 3]]

    def fn(rank, world_size):
        runtime = PipelineRuntime(program, {rank: stages[rank]}, nn.functional.mse_loss)
        for rows in steps:
            runtime.step(*make_batch(4, rows=rows), [0.25] * 4)
        return grads_of(stages[rank])

    out = lab.launch(fn, 4)
    labels = [message.label for message in out.timeline.messages]
    assert labels.count("signatures") == 3 * len(steps)
    assert sum(label.startswith("header") for label in labels) == 3 * 2  # two shapes at each of three boundaries
    assert len(labels) == 3 * len(steps) + 6 + 2 * num_crossings(program) * len(steps)
    model = nn.Sequential(*make_stages(4))
    for rows in steps:
        for x, y in zip(*make_batch(4, rows=rows), strict=True):
            (nn.functional.mse_loss(model(x), y) / 4).backward()
    assert all(bitwise(ours, grads_of(stage)) for ours, stage in zip(out, model, strict=True))


def test_programs_with_odd_routes_infer_shapes_too():
    """A microbatch of its own route; a rank that is on one route only."""
    rows = ["0F0 0F1 2F0 2B0 0B0 0B1", "1F0 1B0", "1F1 2F1 2B1 1B1"]
    program = Program.parse("routes", rows)
    batch = make_batch(2, rows=[2, 3])
    _, (ranks,) = run_all([program], 3, [batch], [[0.5, 0.5]], boundary=None)
    check(program, ranks, batch)
