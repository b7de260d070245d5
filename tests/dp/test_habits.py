"""What a user of torch writes by habit around an optimizer: equal to one process, or refused in one sentence."""

import copy
import io
import pickle
import re

import pytest
import torch
from models import launch, worst
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from zero_runs import STAGES

import dualpipe_lab as lab
from dualpipe_lab import tp
from dualpipe_lab.dp import GradientReducer, Zero3, full_gradients, full_weights

HYPER = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-2, "weight_decay": 0.0}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6)).double()


def make(stage, **options):
    options = {**HYPER, **options}
    model = make_model()
    return stage(model, **options)


def backward(model, seed=0, rank=0, world_size=1):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(8, 6, dtype=torch.float64, generator=generator)[rank::world_size] for _ in range(2))
    nn.functional.mse_loss(model(x), y).backward()


def one_process(act=lambda model: None, steps=3, backwards=1):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **HYPER)
    for step in range(steps):
        optimizer.zero_grad()
        for m in range(backwards):
            backward(model, step * backwards + m)
        act(model)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def each(act):
    return lambda optimizer: [act(p) for p in optimizer.module.parameters()]


def clip(optimizer):
    nn.utils.clip_grad_norm_(optimizer.module.parameters(), 0.1)


def clip_after_the_sums(optimizer):
    optimizer.finished_gradients()
    clip(optimizer)


def replace(optimizer):
    optimizer.module[0].weight = nn.Parameter(optimizer.module[0].weight.detach().clone())


SEALED, DROPPED = "is used between backward and step", "was dropped or replaced after its backward"
REFUSED = {
    "clip": (clip, SEALED),
    "clip values": (lambda optimizer: nn.utils.clip_grad_value_(optimizer.module.parameters(), 0.1), SEALED),
    "scale": (each(lambda p: p.grad.mul_(0.5)), SEALED),
    "scale the data": (each(lambda p: p.grad.data.mul_(0.5)), SEALED),
    "divide": (each(lambda p: p.grad.div_(2)), SEALED),
    "scale together": (lambda optimizer: torch._foreach_mul_([p.grad for p in optimizer.names], 2), SEALED),
    "read": (each(lambda p: p.grad.norm()), SEALED),
    "drop one": (lambda optimizer: setattr(optimizer.module[0].bias, "grad", None), DROPPED),
    "drop all": (lambda optimizer: optimizer.module.zero_grad(), DROPPED),
    "replace": (lambda optimizer: setattr(optimizer.module[0].bias, "grad", torch.ones(6).double()), DROPPED),
    "step of torch": (
        lambda optimizer: torch.optim.SGD(optimizer.module.parameters()).step(),
        f"{SEALED}|has no values",
    ),
    "freeze": (lambda optimizer: optimizer.module[0].requires_grad_(False), "0.weight was trained when .* is frozen"),
    "other memory": (
        lambda optimizer: optimizer.module[0].bias.__setattr__("data", torch.ones(6).double()),
        "0.bias has",
    ),
    "new parameter": (replace, "0.weight was replaced since|0.weight has no values here"),
}


def run(rank, world_size, stage, act):
    """The sentence of the refusal, or the weights after three steps in which `act` comes before the update."""
    optimizer = make(stage)
    try:
        for step in range(3):
            optimizer.zero_grad()
            backward(optimizer.module, step, rank, world_size)
            act(optimizer)
            optimizer.step()
    except ValueError as error:
        return str(error)
    return full_weights(optimizer)


def test_gradients_touched_between_backward_and_step_are_refused():
    def fn(rank, world_size):
        acts = {name: act for name, (act, _) in REFUSED.items()}
        refused = {
            (stage.__name__, name): run(rank, world_size, stage, act) for stage in STAGES for name, act in acts.items()
        }
        return refused, [run(rank, world_size, stage, clip_after_the_sums) for stage in STAGES]

    clipped = one_process(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    for refused, (ddp, *sharded) in launch(fn, 2):
        for (stage, name), sentence in refused.items():
            assert isinstance(sentence, str), (stage, name)
            assert re.search(REFUSED[name][1], sentence), (stage, name, sentence)
        assert all(SEALED in sentence for sentence in sharded)
        assert worst(ddp, clipped) < 1e-14  # the full sums are the user's


def test_gradients_are_not_touched_between_microbatches():
    def fn(rank, world_size):
        found = []
        for stage in STAGES:
            optimizer = make(stage, num_backwards=2)
            backward(optimizer.module, 0, rank, world_size)
            with pytest.raises(ValueError, match=SEALED):
                clip(optimizer)
            backward(optimizer.module, 1, rank, world_size)  # a refused reading has changed nothing
            found.append(full_gradients(optimizer))
        return found

    model = make_model()
    backward(model, 0)
    backward(model, 1)
    right = {name: p.grad for name, p in model.named_parameters()}
    assert all(worst(grads, right) < 1e-15 for found in launch(fn, 2) for grads in found)


def test_a_torch_optimizer_over_a_reducer_clips_finished_sums():
    """It drops the gradients, which come back into the bucket, until the reducer is closed."""

    def fn(rank, world_size):
        model = make_model()
        reducer, optimizer = GradientReducer(model.parameters()), torch.optim.AdamW(model.parameters(), **HYPER)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step, rank, world_size)
            for total in reducer.finish():
                total /= world_size
            assert model[3].bias.grad.untyped_storage().data_ptr() == reducer.flats[0].data_ptr()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        reducer.close()
        optimizer.zero_grad()
        model(torch.full((1, 6), float(rank)).double()).sum().backward()
        assert model[3].bias.grad.tolist() == [1.0] * 6  # nobody listens any more
        return weights

    right = one_process(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert all(worst(weights, right) < 1e-14 for weights in launch(fn, 2))


def test_zero_grad_of_the_module_is_enough_where_gradients_are_full():
    def fn(rank, world_size):
        found = []
        for stage in STAGES:
            optimizer = make(stage)
            try:
                for step in range(3):
                    optimizer.module.zero_grad()
                    backward(optimizer.module, step, rank, world_size)
                    optimizer.step()
                found.append(full_weights(optimizer))
            except ValueError as error:
                found.append(str(error))
        return found

    for *full, zero2, zero3 in launch(fn, 2):
        assert all(worst(weights, one_process()) < 1e-14 for weights in full)
        assert all("zero_grad() of the optimizer" in sentence for sentence in (zero2, zero3))


def test_unfreezing_is_noticed_and_frozen_for_a_while_is_not():
    def fn(rank, world_size):
        for stage in STAGES:
            model = make_model()
            model[0].requires_grad_(False)
            optimizer = stage(model, **({"units": [model[0], model[3]]} if stage is Zero3 else {}))
            model[0].requires_grad_(True)
            backward(model, 0, rank, world_size)
            with pytest.raises(ValueError, match=r"0.weight was frozen when .* and is trained now; make the optimizer"):
                optimizer.step()
            optimizer.zero_grad()
            model[0].requires_grad_(False)
            backward(model, 0, rank, world_size)
            assert optimizer.step(max_norm=1.0).stepped

    launch(fn, 2)


class TwoUses(nn.Module):
    """A table and a norm that are used inside of units and outside; `leak`: a weight that only the forward shows."""

    def __init__(self, leak=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Embedding(9, 6))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(2))
        self.norm = self.blocks[0][1]  # a module with two names
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.first[0].weight
        self.leak = leak
        self.double()

    def forward(self, ids):
        x = self.first(ids)
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.norm(x)
        if self.leak:
            x = nn.functional.linear(x, self.blocks[1][0].weight)
        return self.head(x)

    def loss(self, rank=0, world_size=1, penalty=()):
        generator = torch.Generator().manual_seed(1)
        ids, y = (torch.randint(0, 9, (6,), generator=generator)[rank::world_size] for _ in range(2))
        loss = nn.functional.cross_entropy(self(ids), y)
        return loss + sum(weight.square().sum() for weight in penalty)


def test_zero3_gathers_a_weight_with_a_second_use_for_the_full_step_or_refuses_the_use():
    def fn(rank, world_size):
        model = TwoUses()
        optimizer = Zero3(model, units=[model.first, *model.blocks])
        model.loss(rank, world_size, [model.head.weight, model.norm.weight]).backward()
        found, refused = full_gradients(optimizer), []
        for leak, penalty in ((True, lambda model: []), (False, lambda model: model.blocks[1][0].parameters())):
            model = TwoUses(leak)
            optimizer = Zero3(model, units=[model.first, *model.blocks])
            with pytest.raises(ValueError, match=r"blocks\.1\.0\.weight has no values here") as caught:
                model.loss(rank, world_size, penalty(model)).backward()
            refused.append(str(caught.value))
        model = TwoUses()
        optimizer = Zero3(model, units=[model.first, *model.blocks])
        with pytest.raises(ValueError, match="call the module itself"):
            model.head(torch.ones(6).double())
        return found, refused

    model = TwoUses()
    model.loss(penalty=[model.head.weight, model.norm.weight]).backward()
    right = {name: p.grad for name, p in model.named_parameters()}
    for found, _ in launch(fn, 2):
        assert worst(found, right) < 1e-14


def test_weights_under_zero3_are_read_and_loaded_while_they_are_gathered():
    def fn(rank, world_size):
        optimizer = make(Zero3)
        model, parent = optimizer.module, nn.ModuleDict({"model": optimizer.module})
        other = {name: value / 2 for name, value in make_model().state_dict().items()}
        for use in (
            model.state_dict,
            parent.state_dict,
            model[0].state_dict,
            lambda: copy.deepcopy(model),
            lambda: copy.deepcopy(model[0].weight),
            lambda: torch.save(model, io.BytesIO()),
            lambda: model[0].weight.sum(),
            lambda: [p.data for p in model.parameters()],
            lambda: nn.init.zeros_(model[0].bias),
        ):
            with pytest.raises(ValueError, match=r"with optimizer.gathered\(\):"):
                use()
        for module, state in ((model, other), (parent, {f"model.{name}": value for name, value in other.items()})):
            with pytest.raises(RuntimeError, match=r"with optimizer.gathered\(\):"):
                module.load_state_dict(state)
        assert sum(p.numel() for p in model.parameters()) == 6 * 7 * 2 + 12
        assert "Weight(6, 6)" in repr(model[0].weight)
        with optimizer.gathered():
            kept = parent.state_dict()
        with optimizer.gathered():
            model.load_state_dict(other)
            with torch.no_grad():
                model(torch.ones(1, 6).double())  # the units keep what was loaded
            model[0].bias.data.add_(1.0)
        other["0.bias"] += 1.0
        return kept, full_weights(optimizer), other

    before = make_model().state_dict()
    for kept, after, other in launch(fn, 3):
        assert worst({name.removeprefix("model."): value for name, value in kept.items()}, before) == 0.0
        assert worst(after, other) == 0.0


def test_a_norm_of_a_part_of_the_model_is_refused_and_training_without_it_runs():
    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("dp", 2), ("tp", 2)]))
        config = tp.TensorParallel(mesh.group("tp"))
        mesh.group("dp")
        found = []
        for stage in STAGES:
            for where in (mesh, mesh.group("dp")):
                torch.manual_seed(0)
                layer = tp.ColumnParallelLinear(6, 8, tp=config, dtype=torch.float64)
                units = {"units": [layer]} if stage is Zero3 else {}
                model = nn.Sequential(layer) if stage is Zero3 else layer
                optimizer = stage(model, where, **units, reduce="sum")
                model(torch.ones(2, 6).double()).sum().backward()
                if where is mesh:
                    found.append(optimizer.step(max_norm=1e-3).norm)
                    continue
                for use in (optimizer.grad_norm, lambda optimizer=optimizer: optimizer.step(max_norm=1e-3)):
                    with pytest.raises(ValueError, match="sharded along tp; give the optimizer the Mesh of all axes"):
                        use()
                assert optimizer.step(max_norm=1e-3, norm=found[-1]).norm == found[-1]
                optimizer.zero_grad()
                model(torch.ones(2, 6).double()).sum().backward()
                assert optimizer.step().stepped
        return found

    for found in launch(fn, 4):
        # dw = 2 * 2 rows of ones for each of 8 x 6 weights, db the same for 8: two data ranks
        assert all(abs(norm - (16.0 * (48 + 8)) ** 0.5) < 1e-12 for norm in found)


def test_weights_that_are_loaded_into_a_16_bit_model_reach_its_masters():
    """The masters of other weights keep the bits that 16 do not have."""

    def fn(rank, world_size):
        found = []
        for stage in STAGES:
            model = make_model().bfloat16()
            units = {"units": list(model.children())[::3]} if stage is Zero3 else {}
            optimizer = stage(model, **units, lr=0.0, master=True)
            for shard in optimizer.local_shards:
                shard.optimizer.weight.mul_(1 + 1e-4)  # less than half of the distance to the next bf16 number
            with optimizer.gathered(), torch.no_grad():
                model[3].load_state_dict({name: p * 2 for name, p in model[3].state_dict().items()})
            model(torch.ones(1, 6).bfloat16()).sum().backward()
            optimizer.step()
            masters = [float(shard.optimizer.weight.float().abs().sum()) for shard in optimizer.local_shards]
            found.append((full_weights(optimizer)["3.weight"], sum(masters)))
        return found

    right = make_model().bfloat16()
    expected = right[3].weight.detach() * 2
    for found in launch(fn, 1):
        assert all(torch.equal(weight, expected) for weight, _ in found)
        first, norm, last = (
            sum(float(p.detach().float().abs().sum()) for p in right[n].parameters()) for n in (0, 2, 3)
        )
        total = (first + norm) * (1 + 1e-4) + 2 * last
        assert all(abs(masters - total) < 2e-5 for _, masters in found)


@pytest.mark.parametrize("through", [lambda p: p.data, lambda p: p.detach()], ids=["data", "detach"])
def test_clamped_weights_of_16_bits_reach_their_masters_by_either_name(through):
    """As WGAN does after every step: with lr 0 the weights stay as they were clamped."""

    def fn(rank, world_size):
        found = []
        for stage in STAGES:
            model = make_model().bfloat16()
            optimizer = stage(model, lr=0.0, master=True)
            with optimizer.gathered():
                for parameter in model.parameters():
                    through(parameter).clamp_(-0.05, 0.05)
            model(torch.ones(1, 6).bfloat16()).sum().backward()
            optimizer.step()
            found.append(max(float(weight.abs().max()) for weight in full_weights(optimizer).values()))
        return found

    assert all(found == [float(torch.tensor(0.05).bfloat16())] * 4 for found in launch(fn, 2))


TABLES = {"embedding": nn.Embedding(4, 2, max_norm=1.0), "bag": nn.EmbeddingBag(4, 2, max_norm=1.0)}
BAD_OPTIONS = [
    (ValueError, r"embedding has max_norm=1\.0, by which a forward changes rows", {"table": "embedding"}),
    (ValueError, r"bag has max_norm=1\.0, by which a forward changes rows", {"table": "bag"}),
    (TypeError, "optimizer= takes a class such as torch.optim.SGD, got 'adam'", {"optimizer": "adam"}),
    (ValueError, "floating-point numbers, got grad_dtype=torch.int32", {"grad_dtype": torch.int32}),
    (ValueError, "AdamW needs betas in .* lr='0.1'", {"lr": "0.1"}),
    (ValueError, "AdamW needs betas in .* betas=0.9", {"betas": 0.9}),
]


def test_options_and_tables_that_cannot_be_trained_are_refused_and_so_are_copies_of_an_optimizer():
    def fn(rank, world_size):
        for stage in STAGES:
            for kind, message, options in BAD_OPTIONS:
                named = dict(options)
                table = named.pop("table", None)
                model = nn.ModuleDict({table: copy.deepcopy(TABLES[table])}) if table else make_model()
                with pytest.raises(kind, match=message):
                    stage(model, **named)
            optimizer = make(stage, lr=None)
            assert optimizer.param_groups[0]["lr"] == 1e-3
            for duplicate in (copy.deepcopy, pickle.dumps):
                with pytest.raises(ValueError, match=r"cannot be copied or pickled.*dp\.checkpoint\.save"):
                    duplicate(optimizer)

    launch(fn, 1)


def test_a_mode_that_watches_operations_is_no_user_of_gradients():
    """Under FlopCounterMode the engine's own additions pass by Python, gradient by gradient."""

    def fn(rank, world_size):
        found = []
        for stage in STAGES:
            optimizer = make(stage, num_backwards=2)
            for step in range(2):
                optimizer.zero_grad()
                with FlopCounterMode(display=False), torch.device("cpu"):
                    for m in range(2):
                        backward(optimizer.module, 2 * step + m, rank, world_size)
                optimizer.step()
            found.append(full_weights(optimizer))
        return found

    right = one_process(steps=2, backwards=2)
    assert all(worst(weights, right) < 1e-12 for found in launch(fn, 2) for weights in found)


def test_a_frozen_parameter_that_is_added_is_no_change_and_later_changes_are_refused():
    def fn(rank, world_size):
        for stage in STAGES:
            optimizer = make(stage)
            model = optimizer.module
            for step in range(3):
                if step == 1:
                    model.register_parameter("extra", nn.Parameter(torch.ones(2), requires_grad=False))
                optimizer.zero_grad()
                backward(model, step, rank, world_size)
                optimizer.step()
            model.extra.requires_grad_(True)
            optimizer.zero_grad()
            backward(model, 3, rank, world_size)
            with pytest.raises(ValueError, match=r"extra was added since"):
                optimizer.step()

    launch(fn, 2)
