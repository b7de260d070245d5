"""Functions of the caller's own, hooks of torch, and evaluation."""

from itertools import pairwise, product

import pytest
import torch
from rank_runs import LIKE, WIDTH, bitwise, close, expected_grads, grads_of, make_batch, make_stages
from test_split import HOOKS
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.pp.runtime import PipelineRuntime, ReadyAction, Stage
from dualpipe_lab.pp.runtime import stage as stage_module
from dualpipe_lab.pp.schedules import build


class Doubled(Stage):
    """A forward and a backward by hand: y = x W, twice its input's gradient sent on as it is."""

    def __init__(self, index, module):
        super().__init__(index, module)
        self.kept, self.log = {}, []

    def forward(self, microbatch, inputs, extra=None, loss_fn=None, weight=1):
        self.log.append(f"F{microbatch}")
        return super().forward(microbatch, inputs, extra, loss_fn, weight)

    def backward(self, microbatch, grads):
        self.log.append(f"B{microbatch}")
        return super().backward(microbatch, tuple(2 * grad for grad in grads))


def test_a_stage_may_bring_its_own_forward_and_backward():
    program, stages = build("1f1b", 2, 3), make_stages(2)
    batch = make_batch(3)

    def fn(rank, world_size):
        stage = Doubled(0, stages[0]) if rank == 0 else stages[1]
        PipelineRuntime(program, {rank: stage}, nn.functional.mse_loss, LIKE).step(*batch)
        return grads_of(stages[rank]), getattr(stage, "log", None)

    (first, log), (second, _) = lab.launch(fn, 2)
    expected, _ = expected_grads(program, batch)
    assert bitwise([grad / 2 for grad in first], expected[0][0])
    assert bitwise(second, expected[1][1])
    assert log == ["F0", "F1", "B0", "F2", "B1", "B2"]


def test_overlapped_pairs_go_to_the_hook():
    program, stages = build("dualpipev", 2, 6), make_stages(4)
    batch = make_batch(6)
    pairs = [step for step in program.ranks[0] if len(step) == 2]

    def fn(rank, world_size):
        seen = []

        def overlapped(forward: ReadyAction, backward: ReadyAction):
            seen.append((forward.action, backward.action))
            backward.run()  # the other way round: nothing may depend on the order
            forward.run()

        mine = {stage: stages[stage] for stage in (rank, 3 - rank)}
        runtime = PipelineRuntime(program, mine, nn.functional.mse_loss, LIKE, overlapped=overlapped)
        runtime.step(*batch)
        return {stage: grads_of(module) for stage, module in mine.items()}, seen

    out = lab.launch(fn, 2)
    assert out[0][1] == [tuple(pair) for pair in pairs]
    assert pairs
    expected, _ = expected_grads(program, batch)
    for (grads, _), theirs in zip(out, expected, strict=True):
        assert all(bitwise(grads[stage], theirs[stage]) for stage in grads)


def test_a_hook_that_forgets_a_task_is_named():
    program = build("dualpipev", 1, 2)

    def fn(rank, world_size):
        runtime = PipelineRuntime(
            program, dict(enumerate(make_stages(2))), nn.functional.mse_loss, LIKE, overlapped=lambda f, b: f.run()
        )
        runtime.step(*make_batch(2))

    with pytest.raises(lab.RankError, match=r"the hook for overlapped pairs has not run [01]B0"):
        lab.launch(fn, 1)


@pytest.mark.parametrize("name", ["gpipe", "zero_bubble_h1", "interleaved", "dualpipe", "dualpipev"])
def test_evaluation_runs_the_forwards_alone(name):
    program = build(name, 2, 6)
    stages, (inputs, targets) = make_stages(program.num_stages), make_batch(6, rows=[3, 3, 2, 3, 2, 3])

    def fn(rank, world_size):
        mine = {action.stage: stages[action.stage] for action in program.actions(rank)}
        runtime = PipelineRuntime(program, mine, nn.functional.mse_loss, sum_copies=False)
        outputs = runtime.evaluate(inputs).outputs
        losses = runtime.evaluate(inputs, targets, [1 / 6] * 6).losses
        assert not any(stage.live for stage in runtime._stages.values())
        assert all(grad is None for module in mine.values() for grad in grads_of(module))
        runtime.step(inputs, targets, [1 / 6] * 6)  # training goes on
        return outputs, {m: float(loss) for m, loss in losses.items()}, {s: grads_of(mine[s]) for s in mine}

    out = lab.launch(fn, 2)
    outputs = {m: y for found, *_ in out for m, y in found.items()}
    losses = {m: loss for _, found, _ in out for m, loss in found.items()}
    model = nn.Sequential(*stages)
    assert all(torch.equal(outputs[m], model(x)) for m, x in enumerate(inputs))
    expected, loss = expected_grads(program, (inputs, targets))
    assert sum(losses.values()) == pytest.approx(loss, abs=1e-12)
    for (*_, grads), theirs in zip(out, expected, strict=True):
        assert all(bitwise(grads[stage], theirs[stage]) for stage in grads)


class Apart(Stage):
    """A stage of the caller's own, though it changes nothing."""


@pytest.mark.parametrize(("name", "num_ranks"), [("zero_bubble_h1", 2), ("v_half", 4)])
def test_i_and_w_of_the_first_stage_are_one_walk_where_nothing_stands_between(name, num_ranks):
    program = build(name, num_ranks, 8)
    stages, batch = make_stages(program.num_stages), make_batch(8)
    kinds = [[action.kind for action in program.actions(rank)] for rank in range(num_ranks)]
    neighbours = sum(a[:2] == (0, "I") and b == a._replace(kind="W") for a, b in pairwise(program.ranks[0]))
    assert neighbours == {"zero_bubble_h1": 8, "v_half": 1}[name]

    def fn(rank, world_size, make):
        splits, real = [], stage_module.SplitBackward
        stage_module.SplitBackward = lambda *graph: splits.append(1) or real(*graph)
        mine = {action.stage: make(action.stage, stages[action.stage]) for action in program.actions(rank)}
        result = PipelineRuntime(program, mine, nn.functional.mse_loss, LIKE).step(*batch)
        stage_module.SplitBackward = real
        return [grads_of(stage.module) for stage in mine.values()], len(splits), result.peak_activations

    together, apart = (lab.launch(fn, num_ranks, make) for make in (Stage, Apart))
    for rank, ((ours, splits, peak), (theirs, all_splits, other)) in enumerate(zip(together, apart, strict=True)):
        assert all(map(bitwise, ours, theirs))
        assert (peak, all_splits) == (other, kinds[rank].count("I"))
        assert splits == all_splits - (neighbours if rank == 0 else 0)
        spans = together.timeline.spans_by_rank[rank]  # on NCCL the ranks connect by a collective first
        assert [span.kind for span in spans if span.kind != "collective"] == kinds[rank]


def hooked_stages(number, kind, seen):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.PReLU()).double() for _ in range(number)]
    for stage in stages:
        for layer in stage:
            HOOKS[kind](layer, seen)
    return stages


def calls(kind, seen):
    """How many calls the hooks got, and the sum of what they saw."""
    values = [y.grad for y in seen] if kind == "retained" else seen
    return torch.tensor([len(values), sum(float(value.sum()) for value in values)], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_torch_have_the_effects_of_one_process(subtests):
    """Each hook is called once for each microbatch, also where I and W go through the graph apart."""
    programs = [build(name, 2, 4) for name in ("zero_bubble_h1", "zbv", "dualpipe", "dualpipev")]
    kinds = ("tensor", "node", "retained", "backward")
    batch = make_batch(4)

    def fn(rank, world_size):
        found = {}
        for program, kind in product(programs, kinds):
            seen = []
            stages = hooked_stages(program.num_stages, kind, seen)
            mine = {action.stage: stages[action.stage] for action in program.actions(rank)}
            PipelineRuntime(program, mine, nn.functional.mse_loss, LIKE).step(*batch)
            found[program.name, kind] = {s: grads_of(module) for s, module in mine.items()}, calls(kind, seen)
        return found

    out = lab.launch(fn, 2)
    for program, kind in product(programs, kinds):
        seen = []
        stages = hooked_stages(program.num_stages, kind, seen)
        for x, y in zip(*batch, strict=True):
            (nn.functional.mse_loss(nn.Sequential(*stages)(x), y) / 4).backward()
        with subtests.test(name=program.name, kind=kind):
            ranks = [found[program.name, kind] for found in out]
            for grads, _ in ranks:
                for stage, ours in grads.items():
                    close(ours, grads_of(stages[stage]))
            assert torch.allclose(sum(called for _, called in ranks), calls(kind, seen), rtol=1e-12)
