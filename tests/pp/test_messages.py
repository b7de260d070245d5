"""Messages of the runtime: how many buffers stand ready, and how ranks agree on shapes."""

import pytest
import torch
from rank_runs import LIKE, WIDTH, bitwise, expected_grads, grads_of, make_batch, make_stages, run_all
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


@pytest.mark.parametrize(
    ("stage", "options", "message"),
    [
        (
            nn.Identity(),
            {"boundary": LIKE[:1]},
            r"stage 0 made \(3, 4\) of torch.float64 for microbatch 0, the boundary",
        ),
        ("integers", {}, "stage 0 returned torch.int64 for microbatch 0, and no gradient comes back for integers"),
        ("list", {}, "stage 0 must return a tensor, a tuple of tensors or WithLoss"),
        ("growing", {}, r"stage 0 made \(3, 2\) .* for microbatch 1, but \(3, 1\) .* the same shape; pass `boundary`"),
        ("many", {}, "a boundary carries at most 7 tensors"),
    ],
)
def test_what_cannot_cross_is_named_with_rank_and_action(stage, options, message):
    class Odd(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            wide = x[:, : self.calls]
            return {"integers": x.long(), "list": [x], "growing": wide, "many": (x,) * 8}[stage]

    module = Odd() if isinstance(stage, str) else stage

    def fn(rank, world_size):
        runtime = PipelineRuntime(
            build("gpipe", 2, 2),
            {rank: module if rank == 0 else nn.Linear(WIDTH, WIDTH)},
            nn.functional.mse_loss,
            **options,
        )
        runtime.step(*make_batch(2))

    with pytest.raises(lab.RankError, match=message) as caught:
        lab.launch(fn, 2)
    assert "of 'GPipe', rank 0 of the pipeline" in str(caught.value)


def test_outputs_may_be_views_of_anything():
    """The library keeps graphs, not outputs: a slice, a transpose, the input itself."""

    class View(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.how(self.linear(x))

    torch.manual_seed(0)
    views = [lambda y: y[:2], lambda y: y.t(), lambda y: y.t().reshape(-1).view(2, WIDTH)]
    stages = [View(how).double() for how in views]
    stages.insert(2, nn.Identity())
    stages.append(nn.Linear(WIDTH, WIDTH).double())
    inputs = [torch.randn(4, WIDTH, dtype=torch.float64) for _ in range(3)]
    stages[1].linear = nn.Linear(WIDTH, 2).double()
    stages[3].linear = nn.Linear(2, WIDTH).double()
    targets = [torch.zeros(2, WIDTH, dtype=torch.float64)] * 3
    program = build("zero_bubble_h1", 5, 3)

    def fn(rank, world_size):
        PipelineRuntime(program, {rank: stages[rank]}, nn.functional.mse_loss).step(inputs, targets)
        return grads_of(stages[rank])

    out = lab.launch(fn, 5)
    for x, target in zip(inputs, targets, strict=True):
        (nn.functional.mse_loss(nn.Sequential(*stages)(x), target) * (1 / 3)).backward()
    assert all(bitwise(ours, grads_of(stage)) for ours, stage in zip(out, stages, strict=True))


def test_two_pipelines_in_one_process():
    """Every rank belongs to a pipeline along its row and to one along its column."""
    program, stages = build("1f1b", 2, 3), make_stages(2)
    batches = [make_batch(3, seed=seed) for seed in range(4)]

    def fn(rank, world_size):
        row, column = divmod(rank, 2)
        groups = [lab.comm.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        results = []
        for group, place, number in ((groups[row], column, row), (groups[2 + column], row, 2 + column)):
            runtime = PipelineRuntime(program, {place: stages[place]}, nn.functional.mse_loss, group=group)
            runtime.step(*batches[number])
            results.append((number, place, [grad.clone() for grad in grads_of(stages[place])]))
            stages[place].zero_grad()
        return results

    for number, place, grads in [entry for results in lab.launch(fn, 4) for entry in results]:
        expected, _ = expected_grads(program, batches[number])
        assert bitwise(grads, expected[place][place])


def test_programs_with_odd_routes_infer_shapes_too():
    """A microbatch of its own route; a rank that is on one route only."""
    rows = ["0F0 0F1 2F0 2B0 0B0 0B1", "1F0 1B0", "1F1 2F1 2B1 1B1"]
    program = Program.parse("routes", rows)
    batch = make_batch(2, rows=[2, 3])
    _, (ranks,) = run_all([program], 3, [batch], [[0.5, 0.5]], boundary=None)
    check(program, ranks, batch)


class Pair(nn.Module):
    """Hands on two floating point tensors, an integer one between them, and changes their shapes."""

    def __init__(self, last=False):
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), last

    def forward(self, x, tokens=None, kept=None):
        tokens = torch.arange(len(x)) if tokens is None else tokens
        kept = x[:1].float() if kept is None else kept * 2
        y = self.linear(x).tanh() + kept.sum() * tokens.unsqueeze(1)
        return y if self.last else (y, tokens, kept)


@pytest.mark.parametrize("name", ["zero_bubble_h1", "dualpipe"])
def test_tuples_cross_boundaries(name):
    program = build(name, 4, 8)
    torch.manual_seed(0)
    stages = [Pair(last=stage == 3).double() for stage in range(4)]
    inputs, targets = make_batch(8)

    def fn(rank, world_size):
        mine = {action.stage: stages[action.stage] for action in program.actions(rank)}
        PipelineRuntime(program, mine, nn.functional.mse_loss, sum_copies=True).step(inputs, targets)
        return {stage: grads_of(module) for stage, module in mine.items()}

    out = lab.launch(fn, 4)
    for x, target in zip(inputs, targets, strict=True):
        values = (x,)
        for stage in stages[:3]:
            values = stage(*values)
        (nn.functional.mse_loss(stages[3](*values), target) / 8).backward()
    for grads in out:
        for stage, ours in grads.items():
            for a, b in zip(ours, grads_of(stages[stage]), strict=True):
                assert (a - b).abs().max() <= 1e-12 * max(1, b.abs().max())
