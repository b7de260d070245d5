"""What a pipeline tells optimizers: unusual stages, sums by hand, overlap, and what is refused."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.dp.buckets import all_reduce_async
from dualpipe_lab.dp.ddp import DDP, GradientReducer
from dualpipe_lab.dp.sharded import full_gradients
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.pp.runtime import PipelineRuntime, Stage
from dualpipe_lab.pp.runtime.split_backward import SplitBackward
from dualpipe_lab.pp.schedules import build

WIDTH, M = 3, 4
OPTIMIZERS = {"DDP": DDP, "Zero1": Zero1, "Zero2": Zero2, "Zero3": Zero3}


def linear():
    return nn.Linear(WIDTH, WIDTH).double()


class Again(nn.Sequential):
    """Layers that torch runs twice: their graph cannot be split, so I is B, and W is nothing."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class WithoutAutograd(Stage):
    """A stage that sets `.grad` itself, as those with products of their own do."""

    def weight_grad(self, microbatch):
        split = self.live.pop(microbatch).split
        for one in split._intermediates:
            edges = [torch.autograd.graph.GradientEdge(one.node, slot) for slot in one.grads]
            grads = torch.autograd.grad(edges, one.weights, one.grads.values())
            for p, grad in zip(one.weights, grads, strict=True):
                p.grad = grad if p.grad is None else p.grad + grad


class Unused(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.unused = nn.Parameter(torch.ones(4, dtype=torch.float64))


class Hooked(nn.Sequential):
    """Layers with a hook on each output: a split backward makes all their gradients in I."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
            x.register_hook(lambda grad: 3 * grad.clamp(-0.1, 0.02))
        return x


STAGES = {
    "hooks": lambda: Hooked(nn.LayerNorm(WIDTH).double(), linear(), nn.Tanh()),
    "weight norm": lambda: nn.Sequential(nn.Sequential(weight_norm(linear()), nn.Tanh()), linear()),
    "reentrant checkpoint": lambda: nn.Sequential(linear(), Again(nn.Tanh(), linear())),
    "shared": lambda: nn.Sequential(*[linear(), nn.Tanh()] * 2),
    "unused": lambda: Unused(linear(), nn.Tanh()),
}


def make_stages(kind, number):
    torch.manual_seed(0)
    return [STAGES[kind]() if kind in STAGES else nn.Sequential(linear(), nn.Tanh()) for _ in range(number)]


def make_batch():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, M, 2, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)]


def optimize(name, stage, group, **options):
    if name == "Zero3":
        units = [unit for unit in stage.children() if any(True for _ in unit.parameters())]
        return Zero3(stage, group, units=list(dict.fromkeys(units)), **options)
    return OPTIMIZERS[name](stage, group, bucket_bytes=100, **options)


def on_ranks(act, schedule="zero_bubble_h1"):
    """`act(mesh, program, stages of this rank, inputs, targets)` on pp 2 x dp 2."""
    program = build(schedule, 2, M)
    batch = make_batch()

    def fn(rank, world_size):
        stages = make_stages("plain", program.num_stages)
        torch.manual_seed(100 + rank)
        mesh = lab.Mesh(lab.Topology([("pp", 2), ("dp", 2)]))
        mesh.group("pp"), mesh.group("dp")
        mine = {action.stage: stages[action.stage] for action in program.actions(mesh.rank("pp"))}
        return act(mesh, program, mine, *(list(part[mesh.rank("dp")]) for part in batch))

    return lab.launch(fn, 4, output="collect")


def expected(kind, number):
    stages, (xs, ys) = make_stages(kind, number), make_batch()
    model = nn.Sequential(*stages)
    for x, y in zip(xs.flatten(0, 1), ys.flatten(0, 1), strict=True):
        (nn.functional.mse_loss(model(x), y) / (2 * M)).backward()
    zeros = torch.zeros_like
    return [{n: zeros(p) if p.grad is None else p.grad for n, p in stage.named_parameters()} for stage in stages]


def close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= 1e-12 * max(1.0, float(value.abs().max())), name


WEIGHTS = [1 / (2 * M)] * M


def test_stages_that_are_hard_to_split(amount):
    """ZB-H1: W that needs the weights once more, W that is done in I, one unit used twice, a parameter without use."""
    cases = list(product(OPTIMIZERS, [*STAGES, "without autograd"]))[:: amount(1, 2)]

    def train(name, mesh, program, mine, inputs, targets):
        optimizers = {i: optimize(name, stage.module, mesh.group("dp")) for i, stage in mine.items()}
        runtime = PipelineRuntime(program, mine, nn.functional.mse_loss, group=mesh.group("pp"))
        found = []
        for _ in range(2):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            runtime.step(inputs, targets, WEIGHTS)
            found.append({i: full_gradients(optimizer) for i, optimizer in optimizers.items()})
        return found

    def act(mesh, program, mine, inputs, targets):
        results = {}
        for name, kind in cases:
            stages, wrap = make_stages(kind, 2), WithoutAutograd if kind == "without autograd" else Stage
            results[name, kind] = train(name, mesh, program, {i: wrap(i, stages[i]) for i in mine}, inputs, targets)
        return results

    out = on_ranks(act)
    for name, kind in cases:
        theirs = expected(kind, 2)
        for grads in (grads for found in out for grads in found[name, kind]):
            for index, ours in grads.items():
                close(ours, theirs[index])


def test_shards_add_up_over_steps_of_a_pipeline_and_sums_on_their_way_do_not():
    """Nor is a step added to a sum that has begun, until the optimizer has made its step."""

    def act(mesh, program, mine, inputs, targets):
        found = []
        for name in OPTIMIZERS:
            ((index, stage),) = make_mine(mesh, program)
            optimizer = optimize(name, stage, mesh.group("dp"))
            runtime = PipelineRuntime(program, {index: stage}, nn.functional.mse_loss, group=mesh.group("pp"))
            runtime.step(inputs, targets, WEIGHTS)
            if name in ("Zero2", "Zero3"):
                runtime.step(inputs, targets, WEIGHTS)
                found.append((index, full_gradients(optimizer)))
            with pytest.raises(ValueError, match=r"call zero_grad|set num_backwards to the microbatches of all"):
                runtime.step(inputs, targets, WEIGHTS)
            if name in ("DDP", "Zero1"):
                optimizer.step()
                optimizer.zero_grad()
                runtime.step(inputs, targets, WEIGHTS)
        return found

    theirs = expected("plain", 2)
    for index, twice in (one for found in on_ranks(act) for one in found):
        close(twice, {key: 2 * value for key, value in theirs[index].items()})


def make_mine(mesh, program):
    stages = make_stages("plain", program.num_stages)
    return sorted({action.stage: stages[action.stage] for action in program.actions(mesh.rank("pp"))}.items())


def test_mirrors_by_hand():
    """Shards may be added after the step; sums that have begun may not, and are right by default."""

    def act(mesh, program, mine, inputs, targets):
        found = []
        for name in OPTIMIZERS:
            mine = dict(make_mine(mesh, program))
            optimizers = {i: optimize(name, stage, mesh.group("dp")) for i, stage in mine.items()}
            runtime = PipelineRuntime(program, mine, nn.functional.mse_loss, group=mesh.group("pp"), sum_copies=False)
            runtime.step(inputs, targets, WEIGHTS)
            assert all(optimizer.reducer.lone_copies for optimizer in optimizers.values())
            if name in ("DDP", "Zero1"):
                with pytest.raises(ValueError, match="let the pipeline add mirrors"):
                    runtime.sum_copies()
                continue
            runtime.sum_copies()
            assert not any(optimizer.reducer.lone_copies for optimizer in optimizers.values())
            found += [(i, full_gradients(optimizer)) for i, optimizer in optimizers.items()]
        return found

    theirs = expected("plain", 2)
    for index, ours in (one for found in on_ranks(act, "dualpipe") for one in found):
        close(ours, theirs[index])


def test_tied_weights():
    """Tied to each other: whole sums may be added when they are there; shards of two stages lie differently."""

    def act(mesh, program, mine, inputs, targets):
        grad, names = None, {0: "0.weight", 1: "0.weight"}
        for name in OPTIMIZERS:
            ((index, stage),) = make_mine(mesh, program)
            optimizer = optimize(name, stage, mesh.group("dp"))
            runtime = PipelineRuntime(program, {index: stage}, nn.functional.mse_loss, group=mesh.group("pp"))
            runtime.step(inputs, targets, WEIGHTS)
            rule = "has begun" if name == "DDP" else "use DDP for stages with tied weights"
            with pytest.raises(ValueError, match=rule):
                runtime.sum_tied(names)
            full_gradients(optimizer)
            if name == "DDP":
                runtime.sum_tied(names)
                grad = stage[0].weight.grad
        return grad

    one, other = (grads["0.weight"] for grads in expected("plain", 2))
    for grad in on_ranks(act):
        assert (grad - one - other).abs().max() <= 1e-12


def test_sums_begin_while_the_last_backward_still_runs():
    """Two buckets under 1F1B: the first leaves before the backward has made the second one's gradients."""
    events = []

    def spy(flat, group):
        events.append("sum")
        return all_reduce_async(flat, group)

    def act(mesh, program, mine, inputs, targets):
        (stage,) = mine.values()
        stage[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
        reducer = GradientReducer(
            reversed(list(stage.parameters())), mesh.group("dp"), bucket_bytes=1, reduce_async=spy
        )
        runtime = PipelineRuntime(program, mine, nn.functional.mse_loss, group=mesh.group("pp"))
        runtime.step(inputs, targets, WEIGHTS)
        reducer.finish()
        return events

    for found in on_ranks(act, "1f1b"):
        assert found == ["gradient"] * M + ["sum", "sum"]


def test_groups_of_other_stages_and_of_mirrors_are_refused():
    def act(mesh, program, mine, inputs, targets):
        found = []
        for kind, group, mirrors in ((1, "pp", False), (2, "dp", True), (2, "pp", True)):
            program = build("1f1b" if kind == 1 else "dualpipe", 2, M)
            torch.manual_seed(0)  # copies of a stage begin alike
            made = [linear() for _ in range(program.num_stages)]
            stages = {action.stage: made[action.stage] for action in program.actions(mesh.rank("pp"))}
            optimizers = [DDP(stage, mesh.group(group)) for stage in stages.values()]
            runtime = PipelineRuntime(
                program, stages, nn.functional.mse_loss, group=mesh.group("pp"), sum_copies=mirrors
            )
            try:
                runtime.step(inputs, targets)
                found.append("")
            except ValueError as error:
                found.append(str(error))
            del optimizers
        return found

    for stages, right, mirrors in on_ranks(act):
        assert "of this pipeline has other stages; give it the ranks along dp" in stages
        assert not right
        assert "say sum_copies=False, or leave out that rank" in mirrors


def test_mirrors_that_shard_in_other_ways_are_refused():
    def act(mesh, program, mine, inputs, targets):
        order = sorted(mine, reverse=bool(mesh.rank("pp")))
        optimizer = Zero2(nn.ModuleList(mine[i] for i in order), mesh.group("dp"))
        runtime = PipelineRuntime(program, mine, nn.functional.mse_loss, group=mesh.group("pp"))
        with pytest.raises(ValueError, match="over the same stages in the same order"):
            runtime.step(inputs, targets, WEIGHTS)
        return optimizer.num_steps

    on_ranks(act, "dualpipe")


def test_a_root_that_nobody_gathers_is_refused():
    def act(mesh, program, mine, inputs, targets):
        zero = Zero3(nn.ModuleList(mine.values()), mesh.group("dp"), units=[stage[0] for stage in mine.values()][1:])
        runtime = PipelineRuntime(program, mine, nn.functional.mse_loss, group=mesh.group("pp"))
        with pytest.raises(ValueError, match=r"0\.0\.weight, 0\.0\.bias belong to none; name units"):
            runtime.step(inputs, targets, WEIGHTS)
        return zero.num_steps

    on_ranks(act, "interleaved")


@pytest.mark.parametrize("name", ["Zero2", "Zero3"])
def test_a_split_backward_that_nobody_announces_is_refused(name):
    def fn(rank, world_size):
        stage = nn.Sequential(linear(), nn.Tanh())
        optimizer = optimize(name, stage, None)
        x = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
        y = stage(x)
        split = SplitBackward([torch.autograd.graph.get_gradient_edge(y)], [x], has_hooks=False)
        split.input_grad([torch.ones_like(y)])
        with pytest.raises(ValueError, match="run the stages with a PipelineRuntime"):
            split.weight_grad()
        comm.barrier()
        return optimizer.num_steps

    lab.launch(fn, 2, output="collect")


@pytest.mark.parametrize(
    ("name", "schedule", "gathers", "scatters"),
    [
        ("Zero2", "1f1b", 0, 2),
        ("Zero2", "zero_bubble_h1", 0, 2),
        ("Zero3", "1f1b", 4, 2),
        ("Zero3", "zero_bubble_h1", 6, 2),
    ],
)
def test_messages_of_each_microbatch(name, schedule, gathers, scatters):
    """Two units, or two buckets: a scatter of each, and gathers for F and B, or for F, I and W."""

    def act(mesh, program, mine, inputs, targets):
        stages = {index: nn.Sequential(linear(), nn.Tanh(), linear()) for index in mine}
        optimizers = [optimize(name, stage, mesh.group("dp")) for stage in stages.values()]
        runtime = PipelineRuntime(program, stages, nn.functional.mse_loss, group=mesh.group("pp"))
        runtime.step(inputs, targets, WEIGHTS)
        return len(optimizers)

    ledger = on_ranks(act, schedule).ledger
    for rank in (2, 3):  # the last stage: the first one has nobody to send an input's gradient to, and no I of its own
        assert ledger.count("all_gather_single", rank) == M * gathers
        assert ledger.count("reduce_scatter_single", rank) == M * scatters
