"""What a pipeline tells optimizers: unusual stages, sums by hand, overlap, and what is refused."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
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
    "two layers": lambda: nn.Sequential(linear(), nn.Tanh(), linear()),
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
        return Zero3(stage, group, units=list(dict.fromkeys(units)), reduce="sum", **options)
    return OPTIMIZERS[name](stage, group, bucket_bytes=100, reduce="sum", **options)


WEIGHTS = [1 / (2 * M)] * M


def placed(program, kind="plain"):
    """In a rank of pp 2 x dp 2: the mesh, its stages by number, its inputs and targets."""
    mesh, stages = lab.Mesh(lab.Topology([("pp", 2), ("dp", 2)])), make_stages(kind, program.num_stages)
    numbers = program.stages_of(mesh.rank("pp"))
    return mesh, {number: stages[number] for number in numbers}, [list(part[mesh.rank("dp")]) for part in make_batch()]


def on_ranks(act, schedule="zero_bubble_h1", cases=tuple((name, "plain") for name in OPTIMIZERS), **options):
    """On every rank `act(name, step, runtime, optimizers)` for each optimizer and kind of stages, by case."""
    program = build(schedule, 2, M)

    def fn(rank, world_size):
        found = {}
        for name, kind in cases:
            mesh, stages, batch = placed(program, kind)
            wrap = WithoutAutograd if kind == "without autograd" else Stage
            optimizers = {index: optimize(name, stage, mesh.group("dp")) for index, stage in stages.items()}
            held = {index: wrap(index, stage) for index, stage in stages.items()}
            runtime = PipelineRuntime(program, held, mse_loss, group=mesh.group("pp"), **options)
            found[name, kind] = act(name, partial(runtime.step, *batch, WEIGHTS), runtime, optimizers)
        return found

    return lab.launch(fn, 4, output="collect")


def gradients(optimizers):
    return {index: full_gradients(optimizer) for index, optimizer in optimizers.items()}


def compare(found, kind, times=1):
    """Gradients by stage, in several steps, with so many times those of one process."""
    stages, (xs, ys) = make_stages(kind, 2), make_batch()
    model = nn.Sequential(*stages)
    for x, y in zip(xs.flatten(0, 1), ys.flatten(0, 1), strict=True):
        (times * mse_loss(model(x), y) / (2 * M)).backward()
    for index, ours in (one for grads in found for one in grads.items()):
        theirs = dict(stages[index].named_parameters())
        assert ours.keys() == theirs.keys()
        for name, p in theirs.items():
            value = torch.zeros_like(p) if p.grad is None else p.grad
            assert (ours[name] - value).abs().max() <= 1e-12 * max(1.0, float(value.abs().max())), name


def test_stages_that_are_hard_to_split(amount):
    """ZB-H1: W that needs the weights once more, W that is done in I, one unit used twice, a parameter without use."""
    cases = list(product(OPTIMIZERS, [*STAGES, "without autograd"]))[:: amount(1, 2)]

    def act(name, step, runtime, optimizers):
        found = []
        for _ in range(2):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            step()
            found.append(gradients(optimizers))
        return found

    for results in on_ranks(act, cases=cases):
        for (_, kind), found in results.items():
            compare(found, kind)


def test_shards_add_up_over_steps_of_a_pipeline_and_sums_on_their_way_do_not():
    """Nor is a step added to a sum that has begun, until the optimizer has made its step."""

    def act(name, step, runtime, optimizers):
        (optimizer,), found = optimizers.values(), []
        step()
        if name in ("Zero2", "Zero3"):
            step()
            found.append(gradients(optimizers))
        with pytest.raises(ValueError, match=r"call zero_grad|set num_backwards to the microbatches of all"):
            step()
        if name in ("DDP", "Zero1"):
            optimizer.step()
            optimizer.zero_grad()
            step()
        return found

    for results in on_ranks(act):
        for found in results.values():
            compare(found, "plain", times=2)


def test_mirrors_by_hand():
    """Shards may be added after the step; sums that have begun may not, and are right by default."""

    def act(name, step, runtime, optimizers):
        step()
        assert all(optimizer.reducer.lone_copies for optimizer in optimizers.values())
        if name in ("DDP", "Zero1"):
            with pytest.raises(ValueError, match="let the pipeline add mirrors"):
                runtime.sum_copies()
            return []
        runtime.sum_copies()
        assert not any(optimizer.reducer.lone_copies for optimizer in optimizers.values())
        return [gradients(optimizers)]

    for results in on_ranks(act, "dualpipe", sum_copies=False):
        for found in results.values():
            compare(found, "plain")


def test_tied_weights():
    """Tied to each other: whole sums may be added when they are there; shards of two stages lie differently."""

    def act(name, step, runtime, optimizers):
        step()
        names = {0: "0.weight", 1: "0.weight"}
        rule = "has begun" if name == "DDP" else "use DDP for stages with tied weights"
        with pytest.raises(ValueError, match=rule):
            runtime.sum_tied(names)
        (own,) = gradients(optimizers).values()
        if name != "DDP":
            return None
        own = own["0.weight"].clone()
        runtime.sum_tied(names)
        ((total,),) = ([grads["0.weight"]] for grads in gradients(optimizers).values())
        return own, total

    found = [results["DDP", "plain"] for results in on_ranks(act)]
    for _, total in found:
        assert (total - found[0][0] - found[-1][0]).abs().max() <= 1e-12  # of the first stage and of the last


def test_sums_begin_while_the_last_backward_still_runs():
    """Two buckets under 1F1B: the first leaves before the backward has made the second one's gradients."""
    program, events = build("1f1b", 2, M), []

    def spy(flat, group):
        events.append("sum")
        return all_reduce_async(flat, group)

    def fn(rank, world_size):
        mesh, mine, batch = placed(program)
        (stage,) = mine.values()
        stage[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
        reducer = GradientReducer(
            reversed(list(stage.parameters())), mesh.group("dp"), bucket_bytes=1, reduce_async=spy
        )
        PipelineRuntime(program, mine, mse_loss, group=mesh.group("pp")).step(*batch, WEIGHTS)
        reducer.finish()
        return events

    for found in lab.launch(fn, 4, output="collect"):
        assert found == ["gradient"] * M + ["sum", "sum"]


def in_another_order(mesh, stages):
    return [Zero2(nn.ModuleList(stages[::-1] if mesh.rank("pp") else stages), mesh.group("dp"))]


def without_a_unit(mesh, stages):
    return [Zero3(nn.ModuleList(stages), mesh.group("dp"), units=[stage[0] for stage in stages][1:])]


@pytest.mark.parametrize(
    ("schedule", "make", "message"),
    [
        (
            "1f1b",
            lambda mesh, stages: [DDP(stage, mesh.group("pp")) for stage in stages],
            "of this pipeline has other stages; give it the ranks along dp",
        ),
        (
            "dualpipe",
            lambda mesh, stages: [DDP(stage, mesh.group("pp")) for stage in stages],
            "say sum_copies=False, or leave out that rank",
        ),
        ("dualpipe", in_another_order, "over the same stages in the same order"),
        ("interleaved", without_a_unit, r"0\.0\.weight, 0\.0\.bias belong to none; name units"),
    ],
)
def test_optimizers_of_other_groups_orders_and_units_are_refused(schedule, make, message):
    program = build(schedule, 2, M)

    def fn(rank, world_size):
        mesh, mine, batch = placed(program)
        optimizers = make(mesh, list(mine.values()))
        with pytest.raises(ValueError, match=message):
            PipelineRuntime(program, mine, mse_loss, group=mesh.group("pp")).step(*batch)
        return len(optimizers)

    lab.launch(fn, 4, output="collect")


def recomputed(layers, x):
    """Torch recomputes each layer with an engine of its own."""
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    x.sum().backward()


def by_hand(layers, x):
    """W of one layer at a time."""
    loss = layers(x).sum()
    for layer in layers:
        torch.autograd.backward(loss, inputs=list(layer.parameters()), retain_graph=True)


def split_in_two(layers, x):
    y = layers(x)
    split = SplitBackward([torch.autograd.graph.get_gradient_edge(y)], [x], has_hooks=False)
    split.input_grad([torch.ones_like(y)])
    split.weight_grad()


def test_a_backward_in_pieces_that_nobody_announces_is_explained():
    """Under ZeRO without a pipeline: in more runs of the engine than there are microbatches, or in two halves."""
    number = "this is backward number 3 of the step, and num_backwards=2; .*"

    def fn(rank, world_size):
        for make, backward, message in (
            (lambda layers: Zero2(layers, num_backwards=2, bucket_bytes=40), recomputed, number),
            (lambda layers: Zero2(layers, num_backwards=2, bucket_bytes=40), by_hand, number),
            (Zero2, split_in_two, ""),
            (Zero3, split_in_two, ""),
        ):
            layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
            optimizer = make(layers)
            with pytest.raises(ValueError, match=f"{message}run the stages with a PipelineRuntime"):
                backward(layers, torch.ones(2, WIDTH, requires_grad=True))
            comm.barrier()
            assert optimizer.num_steps == 0

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
    ledger = on_ranks(lambda name, step, *_: step() and None, schedule, [(name, "two layers")]).ledger
    for rank in (2, 3):  # the last stage: the first one has nobody to send an input's gradient to, and no I of its own
        assert ledger.count("all_gather_single", rank) == M * gathers
        assert ledger.count("reduce_scatter_single", rank) == M * scatters
