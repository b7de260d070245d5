"""Elementwise optimizers of torch on shards, with param groups, schedulers and checkpoints, equal one process."""

import inspect
import itertools
import pydoc

import pytest
import torch
from models import launch, worst
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from zero_runs import STAGES

from dualpipe_lab.dp import DDP, LossScaler, ShardedEMA, Zero1, Zero2, Zero3, full_weights
from dualpipe_lab.dp.checkpoint import CheckpointError, load, save

STEPS = 3


class Own(optim.Optimizer):
    """Elementwise, with an own test for a state that is there; its numbers per group are read by the constructor."""

    def __init__(self, params, lr=0.1, start=1.0):
        super().__init__(params, {"lr": lr, "start": start})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    self.state[p]["mean"] = torch.full_like(p, group["start"])
                self.state[p]["mean"].mul_(0.5).add_(p.grad)
                p.sub_(self.state[p]["mean"], alpha=group["lr"])


OPTIMIZERS = {
    "ours": (None, {"lr": 0.01, "eps": 1e-3}),
    "AdamW": (optim.AdamW, {"lr": 0.01, "eps": 1e-3}),
    "Adam": (optim.Adam, {"lr": 0.01, "eps": 1e-3, "amsgrad": True}),
    "SGD": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "NAdam": (optim.NAdam, {"lr": 0.01, "eps": 1e-3}),
    "RAdam": (optim.RAdam, {"lr": 0.01, "eps": 1e-3}),
    "Adamax": (optim.Adamax, {"lr": 0.01, "eps": 1e-3}),
    "Adagrad": (optim.Adagrad, {"lr": 0.01, "eps": 1e-3, "initial_accumulator_value": 0.1}),
    "Adadelta": (optim.Adadelta, {"lr": 0.1, "eps": 1e-3}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "eps": 1e-3, "momentum": 0.9, "centered": True}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
    "ASGD": (optim.ASGD, {"lr": 0.1, "t0": 1}),
    "own": (Own, {"lr": 0.1}),
}
SCHEDULERS = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=STEPS),
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}
ROWS = [(name, {}) for name in OPTIMIZERS]
ROWS += [(name, {"scheduler": rates}) for rates in SCHEDULERS for name in ("ours", "momentum")]
ROWS += [(name, {"max_norm": 0.05, "scaled": True}) for name in ("ours", "RMSprop")]


def make_model(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def groups(model):
    """No decay for biases and norms, and more momentum where there is any; the second group is a generator."""
    named = list(model.parameters())
    return [
        {"params": [p for p in named if p.dim() == 1], "weight_decay": 0.0, "momentum": 0.8},
        {"params": (p for p in named if p.dim() > 1)},
    ]


def loss_of(model, step, rank=0, world_size=1):
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(7, width, dtype=torch.float64, generator=generator) for width in (5, 3))
    rows = slice(rank, None, world_size)
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(x[rows].to(dtype)), y[rows].to(dtype), reduction="sum") / 21


def train(optimizer, module, steps=range(STEPS), rank=0, world_size=1, scheduler=None, max_norm=None, scaled=False):
    rates = SCHEDULERS[scheduler](optimizer) if scheduler else None
    scaler = LossScaler(2.0**10) if scaled and isinstance(optimizer, DDP | Zero1 | Zero2 | Zero3) else None
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(module, step, rank, world_size)
        (scaler.scaled(loss) if scaler else loss).backward()
        if scaler:
            assert optimizer.step(scaler=scaler).stepped
        else:
            if max_norm and type(optimizer).__module__.startswith("torch"):
                nn.utils.clip_grad_norm_(module.parameters(), max_norm)
            optimizer.step()
        if rates:
            rates.step(*([float(step)] if scheduler == "ReduceLROnPlateau" else []))


def one_process(name, **options):
    model, (kind, numbers) = make_model(), OPTIMIZERS[name]
    train((kind or optim.AdamW)(groups(model), **numbers), model, **options)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def build(stage, name, model, **options):
    kind, numbers = OPTIMIZERS[name]
    return stage(model, params=groups(model), optimizer=kind, reduce="sum", **numbers, **options)


def test_every_elementwise_optimizer_equals_one_process_under_every_stage():
    def fn(rank, world_size):
        found = {}
        for name, options in ROWS:
            for stage in STAGES:
                optimizer = build(stage, name, make_model(seed=rank), max_norm=options.get("max_norm"))
                train(optimizer, optimizer.module, rank=rank, world_size=world_size, **options)
                found[name, *options.values(), stage.__name__] = full_weights(optimizer)
        return found

    first, second = launch(fn, 2)
    expected = {(name, *options.values()): one_process(name, **options) for name, options in ROWS}
    for case, weights in first.items():
        assert worst(weights, second[case]) == 0, case
        assert worst(weights, expected[case[:-1]]) < 1e-12, case
    for stage in ("DDP", "Zero1", "Zero2", "Zero3"):
        assert worst(first["ours", stage], first["AdamW", stage]) == 0


HALVES = [
    (torch.bfloat16, {"master": True}, False),
    (torch.float16, {"master": True}, True),
    (torch.bfloat16, {"rounding_seed": 3}, False),
]


def test_16_bit_weights_with_masters_or_rounded_at_random_are_alike_under_every_stage_and_close_to_float64():
    def fn(rank, world_size):
        found = {}
        for name in ("momentum", "Adagrad", "ours"):
            for dtype, more, scaled in HALVES:
                for stage in STAGES:
                    optimizer = build(stage, name, make_model(dtype), **more)
                    train(optimizer, optimizer.module, rank=rank, world_size=world_size, scaled=scaled)
                    for shard in optimizer.local_shards:
                        kept = shard.optimizer.state.values()
                        assert {value.dtype for value in kept if isinstance(value, torch.Tensor)} == {torch.float32}
                        assert shard.optimizer.weight.dtype == (torch.float32 if "master" in more else dtype)
                    found[name, dtype, *more, stage.__name__] = full_weights(optimizer)
        return found

    first, second = launch(fn, 2)
    for (name, dtype, way, stage), weights in first.items():
        assert worst(weights, second[name, dtype, way, stage]) == 0
        assert worst(weights, dict(make_model(dtype).named_parameters())) > 0.01
        assert worst(weights, one_process(name)) < 2**-6
        # draws of a rounding depend on where a shard begins, which differs from stage to stage
        assert worst(weights, first[name, dtype, way, "DDP"]) <= (0.0 if way == "master" else 2**-6)


RESUMED = ("own", "SGD", "ours", "momentum", "NAdam", "Rprop", "Adagrad", "ASGD", "Adam")


def test_checkpoints_go_on_with_another_number_of_ranks_and_another_stage(tmp_path):
    """After 0 and after 2 steps, on 2 ranks; the first of them loads what has no state yet into what has."""

    def saving(rank, world_size):
        for name in RESUMED:
            for at, (steps, stage) in enumerate(((0, Zero2), (2, Zero1))):
                optimizer = build(stage, name, make_model())
                average = ShardedEMA(optimizer, 0.5)
                train(optimizer, optimizer.module, range(steps), rank, world_size)
                average.update()
                optimizer.param_groups[1]["lr"] *= 0.5
                save(tmp_path / name, at + 1, optimizer)

    def loading(rank, world_size):
        found = {}
        for name in RESUMED:
            for at, steps in enumerate((0, 2)):
                for stage in (DDP, Zero3):
                    optimizer = build(stage, name, make_model(seed=5))
                    ShardedEMA(optimizer, 0.5)
                    if steps == 0:
                        train(optimizer, optimizer.module, range(1), rank, world_size)
                    load(tmp_path / name / f"step-{at + 1:08d}", optimizer)
                    train(optimizer, optimizer.module, range(steps, STEPS), rank, world_size)
                    found[name, steps, stage.__name__] = full_weights(optimizer), optimizer.num_steps
        return found

    launch(saving, 2)
    for (name, steps, stage), (weights, num_steps) in launch(loading, 3)[0].items():
        model, (kind, numbers) = make_model(), OPTIMIZERS[name]
        reference = (kind or optim.AdamW)(groups(model), **numbers)
        train(reference, model, range(steps))
        reference.param_groups[1]["lr"] *= 0.5
        train(reference, model, range(steps, STEPS))
        assert num_steps == STEPS
        assert worst(weights, dict(model.named_parameters())) < 1e-12, (name, steps, stage)


class Lamb(optim.SGD):
    """A step as long as the weight is, as LAMB and LARS take it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * float(p.norm() / p.grad.norm()))


class Late(optim.SGD):
    """Elementwise for five steps; then a step is as long as the gradient is, as Shampoo begins to precondition."""

    @torch.no_grad()
    def step(self, closure=None):
        self.num = getattr(self, "num", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / (p.grad.norm() if self.num > 5 else 1), alpha=group["lr"])


class Central(optim.SGD):
    """Gradients of convolutions, and of nothing else, lose their mean."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad - (p.grad.mean() if p.dim() > 2 else 0), alpha=group["lr"])


class Listed(optim.SGD):
    """An optimizer whose state is no tensor."""

    def step(self, closure=None):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["seen"] = [1]


def test_what_cannot_be_is_refused_in_one_sentence(tmp_path):
    def refused(words, make, kind=ValueError):
        with pytest.raises(kind, match=words):
            make()

    def fn(rank, world_size):
        model = make_model()
        for kind in (optim.SparseAdam, optim.LBFGS, optim.Muon, optim.Adafactor, Lamb, Late, Central):
            refused(f"{kind.__name__} cannot train flat shards", lambda kind=kind: Zero1(model, optimizer=kind))
        everything, some = {"params": model.parameters()}, list(model.parameters())[1:]
        refused("Invalid learning rate: -1", lambda: Zero1(model, optimizer=optim.SGD, lr=-1))
        refused(r"betas in \[0, 1\)", lambda: Zero1(model, params=[everything | {"betas": (0, 1)}]))
        refused("momentum", lambda: Zero1(model, momentum=0.9), TypeError)
        refused("0.weight is in 0", lambda: Zero2(model, params=some))
        refused("0.bias is in 2", lambda: DDP(model, params=[{"params": [*model.parameters()]}, {"params": some[0]}]))
        strange = [*model.parameters(), nn.Parameter(torch.ones(9))]
        refused(r"shape \(9,\) that is not", lambda: Zero3(model, params=strange))
        refused("mesh is a Mesh, a group of ranks or None, got float", lambda: Zero1(model, 0.1), TypeError)
        refused("max_norm > 0, got -1", lambda: Zero1(model, max_norm=-1))
        refused("decay from 0 to below 1, got 1", lambda: ShardedEMA(DDP(model), 1.0))
        optimizer = Zero3(model)
        refused("dp.checkpoint.save", optimizer.state_dict)
        refused("dp.checkpoint.load", lambda: optimizer.load_state_dict({}))
        refused("name all groups with params=", lambda: optimizer.add_param_group({"params": []}))
        refused("takes no closure", lambda: optimizer.step(lambda: None), TypeError)
        optimizer.param_groups[0]["lr"] = 0.1 * rank
        refused("lr of a param group is", lambda: save(tmp_path, 1, optimizer), CheckpointError)
        optimizer = Zero1(make_model(), optimizer=Listed)
        train(optimizer, optimizer.module, range(1), rank, world_size)
        refused("Listed keeps seen, a list", lambda: save(tmp_path, 1, optimizer), CheckpointError)
        optimizer = build(Zero1, "ours", make_model())
        train(optimizer, optimizer.module, range(1), rank, world_size)
        path, other = save(tmp_path, 1, optimizer), build(Zero2, "NAdam", make_model(seed=1))
        refused("NAdam keeps mu_product", lambda: load(path, other), CheckpointError)
        assert not other.local_shards[0].optimizer.state  # nothing has changed
        refused("2 param groups, got 1", lambda: load(path, Zero1(make_model())), CheckpointError)
        sgd = build(Zero1, "SGD", make_model())
        refused("another model or optimizer", lambda: load(path, sgd), CheckpointError)

    launch(fn, 2)


def test_an_eps_that_is_0_in_fp16_is_refused_and_a_larger_one_or_masters_stay_finite_where_no_gradient_is():
    """Two rows of three get no gradient; torch's optimizers make them NaN."""
    kinds = None, optim.Adam, optim.AdamW, optim.NAdam, optim.RMSprop, optim.Adamax, optim.Adagrad

    def fn(rank, world_size):
        for stage in (DDP, Zero1, Zero2, Zero3):
            for kind, options in itertools.product(kinds, ({}, {"eps": 1e-7}, {"master": True})):
                torch.manual_seed(0)
                model = nn.Sequential(nn.Embedding(3, 4)).half()
                if not options:
                    words = (
                        r"^eps=1e-(08|10) is 0 in torch.float16, and weights whose gradients are zero would become NaN"
                    )
                    with pytest.raises(ValueError, match=words):
                        stage(model, optimizer=kind)
                    options = {"eps": 1e-4}  # the refusal has left the model alone
                optimizer = stage(model, optimizer=kind, **options)
                model(torch.zeros(1, dtype=torch.long)).sum().backward()
                optimizer.step()
                (weight,) = full_weights(optimizer).values()
                assert weight.isfinite().all(), (stage, kind, options)
        optimizer = DDP(nn.Linear(1, 1).half(), eps=1e-4)
        optimizer.param_groups[0]["eps"] = 1e-8
        optimizer.module(torch.ones(1).half()).sum().backward()
        with pytest.raises(ValueError, match="eps=1e-08 is 0"):
            optimizer.step()

    launch(fn, 2, timeout=120)


def test_steps_are_seen_by_torchs_hooks_and_help_documents_every_argument():
    def fn(rank, world_size):
        model, seen = nn.Linear(5, 3).double(), []
        optimizer = Zero3(model)  # which has no children: all of it is the root
        optimizer.register_step_pre_hook(lambda *arguments: seen.append("before"))
        optimizer.register_step_post_hook(lambda *arguments: seen.append("after"))
        loss_of(model, 0, rank, world_size).backward()
        assert optimizer.step(max_norm=1.0).stepped
        return seen

    assert launch(fn, 1)[0] == ["before", "after"]
    for stage in STAGES:
        text = pydoc.plain(pydoc.render_doc(stage))
        for name in inspect.signature(stage).parameters:
            assert f"{name}: " in text.split("Args:", 1)[1], (stage, name)
