"""The runtime beside one process: stages of all kinds, whole batches, evaluation, functions and hooks of the caller."""

from itertools import pairwise, product

import pytest
import torch
from rank_runs import (
    LIKE,
    WIDTH,
    assert_trains_as_one_process,
    bitwise,
    close,
    expected_grads,
    grads_of,
    make_batch,
    make_stages,
)
from test_split import HOOKS
from torch import nn
from torch.nn import functional
from torch.nn.functional import mse_loss

import dualpipe_lab as lab
from dualpipe_lab.dp import Zero1
from dualpipe_lab.pp.runtime import PipelineRuntime, ReadyAction, Stage, split_batch
from dualpipe_lab.pp.runtime import stage as stage_module
from dualpipe_lab.pp.schedules import build


def tokens(num_stages, num_microbatches):
    """A whole number for each token, and a microbatch whose loss has no share."""
    stages = [nn.Embedding(5, WIDTH).double(), nn.Linear(WIDTH, 5).double()]
    ids = [torch.tensor([1, 2, 3]), torch.tensor([4, 4, 0]), torch.tensor([0, 1, 1])]
    labels = [torch.tensor([2, -100, 1]), torch.tensor([-100] * 3), torch.tensor([1, 1, 1])]
    return stages, functional.cross_entropy, (ids, labels), [2 / 5, 0.0, 3 / 5]


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


def tuples(num_stages, num_microbatches):
    stages = [Pair(last=stage == num_stages - 1).double() for stage in range(num_stages)]
    return stages, mse_loss, make_batch(num_microbatches)


class View(nn.Module):
    """The runtime keeps graphs, not outputs: a slice, a transpose, the input itself."""

    def __init__(self, how, width=WIDTH):
        super().__init__()
        self.how, self.linear = how, nn.Linear(width, width)

    def forward(self, x):
        return self.how(self.linear(x))


def views(num_stages, num_microbatches):
    kinds = [(lambda y: y[:3], WIDTH), (lambda y: y.t(), WIDTH), (lambda y: y.t().reshape(-1).view(3, WIDTH), 3)]
    stages = [View(*kind).double() for kind in kinds]
    stages = [*stages[:2], nn.Identity(), stages[2], nn.Linear(WIDTH, WIDTH).double()]
    return stages, mse_loss, make_batch(num_microbatches)


def statistics(num_stages, num_microbatches):
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double() for _ in range(num_stages)]
    return stages, mse_loss, make_batch(num_microbatches)


class Scaled(nn.Module):
    """A loss with a weight."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, y, target):
        return (mse_loss(y, target) * self.log_scale.exp() - self.log_scale).mean()


def trained_loss(num_stages, num_microbatches):
    """Without copies and data ranks any loss may have weights."""
    return make_stages(num_stages), Scaled(), make_batch(num_microbatches)


def loss_of_the_last_stage(num_stages, num_microbatches):
    """Trained with its copies, too."""
    stages = make_stages(num_stages)
    stages[-1].loss = Scaled()
    stages[-1].forward = lambda x: stages[-1][1](stages[-1][0](x))
    return stages, stages[-1].loss, make_batch(num_microbatches)


@pytest.mark.parametrize(
    ("make", "name", "num_ranks", "num_microbatches"),
    [
        (tokens, "zero_bubble_h1", 2, 3),
        (tuples, "zero_bubble_h1", 4, 8),
        (tuples, "dualpipe", 4, 8),
        (views, "zero_bubble_h1", 5, 3),
        (statistics, "1f1b", 2, 4),
        (statistics, "zero_bubble_h1", 2, 4),
        (statistics, "zbv", 2, 4),
        (trained_loss, "1f1b", 2, 4),
        (loss_of_the_last_stage, "zero_bubble_h1", 2, 4),
        (loss_of_the_last_stage, "dualpipe", 2, 4),
    ],
)
def test_stages_of_all_kinds_train_as_in_one_process(make, name, num_ranks, num_microbatches):
    program = build(name, num_ranks, num_microbatches)
    torch.manual_seed(0)
    stages, loss_fn, batch, *weights = make(program.num_stages, num_microbatches)
    assert_trains_as_one_process(program, stages, loss_fn, batch, *weights)


class TwoInputs(nn.Module):
    """A first stage with two inputs."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, z):
        return self.one(x).tanh() + self.two(z)


def pair_loss(y, targets):
    return functional.mse_loss(y, targets["near"]) + (y - targets["more"][0]).abs().mean()


def whole_batch():
    generator = torch.Generator().manual_seed(3)
    x, z, near, more = torch.randn(4, 8, WIDTH, dtype=torch.float64, generator=generator)
    return (x, z), {"near": near, "more": (more,)}


def pair_model(number):
    torch.manual_seed(0)
    return [TwoInputs().double(), *(nn.Linear(WIDTH, WIDTH).double() for _ in range(number - 1))]


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "dualpipev"])
def test_a_whole_batch_is_split_and_its_loss_is_that_of_one_process(name):
    """Numbered by an nn.ModuleDict, which an optimizer takes too; or in an nn.ModuleList; or microbatches by hand."""
    program = build(name, 2, 4)
    first = {"dictionary": lambda x, z: {"x": x, "z": z}, "tuple": lambda x, z: (x, z)}

    def fn(rank, world_size):
        found = {}
        for kind in ("dictionary", "tuple", "list", "chunks"):
            model, (inputs, targets) = pair_model(program.num_stages), whole_batch()
            here = program.stages_of(rank)
            stages = nn.ModuleDict({str(number): model[number] for number in here})
            if kind == "list":
                stages = nn.ModuleList(stages.values())
            else:
                Zero1(stages, lab.Mesh(lab.Topology([("pp", 2)])), program=program)
            given = first[kind](*inputs) if kind in first else split_batch(inputs, 4)
            if kind == "chunks":
                given, targets = tuple(given), split_batch(targets, 4)
            runtime = PipelineRuntime(program, stages, pair_loss)
            if name == "1f1b" and kind == "tuple":  # each rank gives what it reads, as to torch's schedules
                result = runtime.step(given) if rank == 0 else runtime.step(targets=targets)
            else:
                result = runtime.step(given, targets)
            loss = None if result.loss is None else float(result.loss)
            found[kind] = {n: grads_of(model[n]) for n in here}, loss, float(sum(result.losses.values()))
            assert runtime.evaluate(given, targets).loss == result.loss
        return found

    model, (inputs, targets) = pair_model(program.num_stages), whole_batch()
    loss = pair_loss(nn.Sequential(*model[1:])(model[0](*inputs)), targets)
    loss.backward()
    out = lab.launch(fn, 2)
    has_last = {"1f1b": [False, True], "dualpipe": [False, False], "dualpipev": [True, False]}[name]
    for kind in out[0]:
        for rank, found in enumerate(out):
            grads, said, _ = found[kind]
            for number, ours in grads.items():
                close(ours, grads_of(model[number]))
            assert (said == pytest.approx(loss.item(), abs=1e-12)) if has_last[rank] else said is None
        assert sum(found[kind][2] for found in out) == pytest.approx(loss.item(), abs=1e-12)


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
        runtime = PipelineRuntime(program, mine, mse_loss, LIKE, overlapped=overlapped)
        runtime.step(*batch)
        return {stage: grads_of(module) for stage, module in mine.items()}, seen

    out = lab.launch(fn, 2)
    assert out[0][1] == [tuple(pair) for pair in pairs]
    assert pairs
    expected, _ = expected_grads(program, batch)
    for (grads, _), theirs in zip(out, expected, strict=True):
        assert all(bitwise(grads[stage], theirs[stage]) for stage in grads)


@pytest.mark.parametrize("name", ["gpipe", "zero_bubble_h1", "interleaved", "dualpipe", "dualpipev"])
def test_evaluation_runs_the_forwards_alone(name):
    program = build(name, 2, 6)
    stages, (inputs, targets) = make_stages(program.num_stages), make_batch(6, rows=[3, 3, 2, 3, 2, 3])

    def fn(rank, world_size):
        mine = {action.stage: stages[action.stage] for action in program.actions(rank)}
        runtime = PipelineRuntime(program, mine, mse_loss, sum_copies=False)
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
        result = PipelineRuntime(program, mine, mse_loss, LIKE).step(*batch)
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
            PipelineRuntime(program, mine, mse_loss, LIKE).step(*batch)
            found[program.name, kind] = {s: grads_of(module) for s, module in mine.items()}, calls(kind, seen)
        return found

    out = lab.launch(fn, 2)
    for program, kind in product(programs, kinds):
        seen = []
        stages = hooked_stages(program.num_stages, kind, seen)
        for x, y in zip(*batch, strict=True):
            (mse_loss(nn.Sequential(*stages)(x), y) / 4).backward()
        with subtests.test(name=program.name, kind=kind):
            ranks = [found[program.name, kind] for found in out]
            for grads, _ in ranks:
                for stage, ours in grads.items():
                    close(ours, grads_of(stages[stage]))
            assert torch.allclose(sum(called for _, called in ranks), calls(kind, seen), rtol=1e-12)
