"""Low-rank adapters beside frozen weights: plain torch in one process, every cut, ZeRO, operations, merging, files."""

import copy
import itertools
from functools import cache

import numpy as np
import pytest
import torch
from runs import assert_a1, counted, distances
from stage_runs import LATENT, LLAMA, SEED, TIED, V3, backward, batch, build, launch, plain_model, step
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dualpipe_lab as lab
from dualpipe_lab import dp
from dualpipe_lab.dp.param_specs import full_name_of
from dualpipe_lab.models import LlamaConfig, PretrainedError, add_lora, merge_lora, save_pretrained
from dualpipe_lab.models.lora import LAYERS, LoRA
from dualpipe_lab.pp import schedules
from dualpipe_lab.tp.linear import ColumnParallelLinear, RowParallelLinear
from dualpipe_lab.tp.shard import TensorParallel, drawn

RANK, ALPHA = 3, 4.5
SHARDED, COALESCED = {"sequence_parallel": True}, {"sequence_parallel": True, "recompute": True}


class Effective(nn.Module):
    """y = x (W + s B A)^T, as autograd derives it."""

    def __init__(self, full_name, weight):
        super().__init__()
        self.register_buffer("weight", weight.detach())
        self.a = nn.Parameter(drawn(f"{full_name}.adapter.a", (RANK, weight.shape[1]), SEED))
        self.b = nn.Parameter(drawn(f"{full_name}.adapter.b", (weight.shape[0], RANK), SEED))

    def forward(self, x):
        return x @ (self.weight + ALPHA / RANK * self.b @ self.a).t()


def reference(config):
    """The full model in plain torch, frozen, with `Effective` in the place of each layer that is adapted."""
    model = plain_model(config).requires_grad_(False)
    for name, layer in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if type(layer) is nn.Linear and last in LAYERS and ".experts" not in name:
            setattr(model.get_submodule(parent), last, Effective(name, layer.weight))
    return model


@cache
def plain(config, num_microbatches=4, num_data=1):
    """Loss and gradients of one process on the whole batch, by the names of `add_lora`."""
    model = reference(config)
    loss = model.loss(*(x.flatten(0, 2) for x in batch(config.vocabulary_size, num_microbatches, num_data)))
    loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach()} | {f"{name[:-1]}adapter.{name[-1]}": grad for name, grad in trained.items()}


def adapt(model, **options):
    """Add adapters whose `b` is drawn by name, too: beside zeros the gradient of `a` is zero."""
    add_lora(model, RANK, alpha=ALPHA, seed=SEED, **options)
    full_name = full_name_of(model)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, LoRA):
                shard = module.shards.get("b")
                full = drawn(f"{full_name(name)}.b", (len(module.b) if shard is None else shard.size, RANK), SEED)
                module.b.copy_(full if shard is None else shard.of(full))
    return model


KINDS = ("1f1b", "zero_bubble_h1", "dualpipe", "dualpipev")  # whole, split, mirrored, folded
CUTS = {  # config, axes, schedules, stage of ZeRO, options, how pairs run
    "dp, ZeRO-1": (LLAMA, [("dp", 4)], ("1f1b",), dp.Zero1, {}),
    "dp, ZeRO-2": (TIED, [("dp", 4)], ("1f1b",), dp.Zero2, {}),
    "dp, ZeRO-3": (LLAMA, [("dp", 4)], ("1f1b",), dp.Zero3, {}),
    "tp, more ranks than KV heads": (LLAMA, [("dp", 2), ("tp", 2)], ("1f1b",), None, {}),
    "sequence parallel, ZeRO-1": (TIED, [("dp", 2), ("tp", 2)], ("1f1b",), dp.Zero1, SHARDED),
    "recomputed, ZeRO-3": (LLAMA, [("dp", 2), ("tp", 2)], ("1f1b",), dp.Zero3, COALESCED),
    "pp and tp": (LLAMA, [("pp", 2), ("tp", 2)], KINDS, None, SHARDED),
    "pp and dp, ZeRO-2": (LLAMA, [("pp", 2), ("dp", 2)], KINDS, dp.Zero2, {}),
    "pp and dp, ZeRO-3": (TIED, [("pp", 2), ("dp", 2)], KINDS[::2], dp.Zero3, {}),
    "cp": (LLAMA, [("cp", 2), ("tp", 2)], ("1f1b",), dp.Zero1, {"layout": "zigzag", **SHARDED}),
    "experts": (V3, [("pp", 2), ("ep", 2)], KINDS[1:3], None, {}),
    "latents": (LATENT, [("dp", 2), ("tp", 2)], ("1f1b",), dp.Zero1, SHARDED),
    "overlapped experts": (V3, [("pp", 2), ("ep", 2)], ("dualpipe",), None, {}, "overlapped"),
}


def found_on(config, axes, names, zero, options, hook=None):
    mesh, found = lab.Mesh(lab.Topology(axes)), {}
    num_data = mesh.size("dp") * mesh.size("ep")
    for name in names:
        torch.manual_seed(lab.comm.get_rank())  # adapters that are not drawn by name would differ
        model = adapt(build(config, mesh, schedules.build(name, mesh.size("pp"), 4), **options))
        units = {"units": list(model.stages.values())} if zero is dp.Zero3 else {}
        optimizer = zero and zero(model, mesh, **units, program=model.program, reduce="sum")
        numbers = step(model, True, optimizer, hook)
        assert all(p.grad is None for name, p in model.named_parameters() if "adapter" not in name)
        found[name] = distances(numbers, plain(config, 4, num_data))
    return found


def test_every_cut_has_the_gradients_of_one_process(some):
    chosen = some(CUTS, 6)

    def fn(rank, world_size):
        return {(cut, name): e for cut, row in chosen.items() for name, e in found_on(*row).items()}

    assert_a1(launch(fn, 4))


def test_one_process_has_the_gradients_of_plain_torch_and_of_peft():
    """An `nn.Linear` is adapted in place; frozen weights get no gradient."""
    peft = pytest.importorskip("peft", reason="peft is a package for development")
    model, expected = adapt(plain_model(LLAMA)), plain(LLAMA)
    other = peft.get_peft_model(
        plain_model(LLAMA), peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(LAYERS), lora_dropout=0.0)
    )
    halves = {"lora_A.default.weight": "adapter.a", "lora_B.default.weight": "adapter.b"}
    theirs = {}
    for name, parameter in other.base_model.model.named_parameters():
        stem, _, half = name.partition(".lora_")
        if half:
            theirs[f"{stem}.{halves[f'lora_{half}']}"] = parameter
    ours = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert theirs.keys() == ours.keys() == expected.keys() - {"loss"}
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.data = ours[name].detach().clone()
    data = [x.flatten(0, 2) for x in batch(LLAMA.vocabulary_size, 4)]
    for one, trained in ((model, ours), (other.base_model.model, theirs)):
        loss = one.loss(*data)
        loss.backward()
        found = {"loss": loss.detach()} | {name: parameter.grad for name, parameter in trained.items()}
        assert_a1([{"": distances(found, expected)}])
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("layers", [LAYERS, ("q",)], ids=["all", "q"])
def test_no_product_is_computed_for_a_frozen_weight(layers):
    """The adapters' own operations are few, and all products for dW are gone, which are a third of a step's."""
    config, tokens = LlamaConfig(64, 32, 64, 3, 2, 1), 16

    def operations(rank, world_size, adapted):
        model = lab.models.Llama(config, lab.Topology([("tp", 1)]), dtype=torch.float64)
        names = [name for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name]
        products = sum(2 * tokens * model.get_parameter(name).numel() for name in names)
        if adapted:
            add_lora(model, RANK, layers=layers)
        ids = torch.arange(tokens).view(1, tokens)
        with FlopCounterMode(display=False) as counter:
            model.loss(ids, ids).backward()
        own = sum(6 * tokens * p.numel() for p in model.parameters() if p.requires_grad and adapted)
        return counter.get_total_flops(), products, own

    (full, products, _), (adapted, _, own) = (lab.launch(operations, 1, flag)[0] for flag in (False, True))
    assert full - adapted >= products - own > products / 2


def test_an_adapter_sends_tensors_of_its_rank():
    """T R numbers: of du in the backward beside a column-parallel layer, of u in the forward beside a row-parallel."""
    tokens, size, inner = 8, 6, 4

    def fn(rank, world_size):
        found = {}
        for kind, sequence_parallel in itertools.product((ColumnParallelLinear, RowParallelLinear), (False, True)):
            tp, is_row = TensorParallel(sequence_parallel=sequence_parallel), kind is RowParallelLinear
            sizes = (inner, size) if is_row else (size, inner)
            layer = kind(*sizes, bias=False, tp=tp, dtype=torch.float64).requires_grad_(False)
            here = tokens // 2 if sequence_parallel and not is_row else tokens
            x = torch.ones(here, inner // 2 if is_row else size, dtype=torch.float64).requires_grad_()

            def step(layer=layer, x=x):
                layer(x).sum().backward()

            alone = counted(step)
            add_lora(nn.ModuleDict({"q": layer}), RANK, layers=["q"])
            found[kind.__name__, sequence_parallel] = alone, counted(step)
        return found

    mine, grad = tokens * RANK * 8, 8 * RANK * size
    found = {
        key: {name: tuple(np.subtract(adapted[name], alone.get(name, (0, 0)))) for name in adapted}
        for key, (alone, adapted) in launch(fn, 2)[0].items()
    }
    halves = {
        "all_gather_single": (1, mine // 2),
        "reduce_scatter_single": (1, mine // 2),
        "all_reduce": (1, grad),
    }
    assert found == {
        ("ColumnParallelLinear", False): {"all_reduce": (1, mine)},
        ("RowParallelLinear", False): {"all_reduce": (1, mine)},
        ("ColumnParallelLinear", True): halves,
        ("RowParallelLinear", True): halves,
    }


def test_merged_weights_compute_what_adapters_did_on_every_cut():
    """On each cut the merged model is the merged model of one process, under the names of one without adapters."""
    model = reference(LLAMA)
    scale = ALPHA / RANK
    expected = {n: p.detach() for n, p in plain_model(LLAMA).named_parameters()}
    for name, layer in model.named_modules():
        if isinstance(layer, Effective):
            expected[f"{name}.weight"] = (layer.weight + scale * layer.b @ layer.a).detach()

    def fn(rank, world_size):
        found = {}
        for axes in ([("dp", 2), ("tp", 2)], [("pp", 2), ("dp", 2)]):
            for zero in (None, dp.Zero3):
                mesh = lab.Mesh(lab.Topology(axes))
                model = adapt(build(LLAMA, mesh, schedules.build("dualpipev", mesh.size("pp"), 4)))
                if zero:
                    units = list(model.stages.values())
                    optimizer = zero(model, mesh, units=units, program=model.program, reduce="sum")
                    with optimizer.gathered():
                        merge_lora(model)
                        found[str(axes), True] = distances(model.full_state_dict(), expected)
                else:
                    merge_lora(model)
                    found[str(axes), False] = distances(model.full_state_dict(), expected)
        return found

    assert_a1(launch(fn, 4))
    one = adapt(plain_model(LLAMA))
    names = [name for name, _ in plain_model(LLAMA).named_modules()]
    ids = batch(LLAMA.vocabulary_size, 1)[0].flatten(0, 2)
    before = one(ids)
    merge_lora(one)
    assert_a1([{"": distances({"y": one(ids)}, {"y": before})}])
    assert [name for name, _ in one.named_modules()] == names


def test_a_checkpoint_of_adapters_holds_nothing_else_and_loads_on_another_cut(tmp_path):
    """Saved on 4 ranks under ZeRO-3 and on a pipeline, loaded on 2 x 2 ranks under ZeRO-1, with its moments."""

    def fn(rank, world_size):
        found, trained = {}, None
        for axes, zero in (([("pp", 2), ("dp", 2)], dp.Zero3), ([("dp", 2), ("tp", 2)], dp.Zero1)):
            mesh = lab.Mesh(lab.Topology(axes))
            model = adapt(build(LLAMA, mesh, schedules.build("1f1b", mesh.size("pp"), 4)))
            units = {"units": list(model.stages.values())} if zero is dp.Zero3 else {}
            optimizer = zero(model, mesh, lr=0.1, **units, program=model.program, reduce="sum")
            if trained is not None:
                dp.checkpoint.load(dp.checkpoint.latest(tmp_path), optimizer, frozen=False)
                found["loaded"] = distances(model.full_state_dict(), trained)
                with pytest.raises(dp.checkpoint.CheckpointError, match=r"has no tensor parameter/.*frozen=False"):
                    dp.checkpoint.load(dp.checkpoint.latest(tmp_path), optimizer)
            backward(model)
            optimizer.step()
            if trained is None:
                path = dp.checkpoint.save(tmp_path, 1, optimizer, frozen=False)
                names = dp.checkpoint.Checkpoint(path).names()
                assert names
                assert all(".adapter." in name for name in names)
                assert len([name for name in names if name.startswith("parameter/")]) == 2 * 7 * LLAMA.num_layers
                with optimizer.gathered():
                    trained = model.full_state_dict()
        return found

    assert_a1(launch(fn, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "a whole rank of 1 or more, and a finite alpha, got 0"),
        ({"rank": 2.0}, "a whole rank of 1 or more"),
        ({"alpha": float("nan")}, "a finite alpha, got 8 and nan"),
        ({"layers": ["query"]}, r"names a layer that the model has not; its linear layers are \['down'.*'head'"),
        ({"layers": ["q", "embedding"]}, "names a layer that the model has not"),
    ],
)
def test_what_cannot_be_adapted_is_refused_and_nothing_has_changed(options, message):
    model = plain_model(LLAMA)
    with pytest.raises(ValueError, match=message):
        add_lora(model, **options)
    assert all(p.requires_grad for p in model.parameters())


def test_adapters_are_not_added_twice_nor_to_one_weight_twice_nor_published(tmp_path):
    model = adapt(plain_model(TIED))
    with pytest.raises(ValueError, match=r"has adapters; name all layers at once, or call merge_lora\(model\) first"):
        add_lora(model)
    with pytest.raises(PretrainedError, match=r"save after merge_lora\(model\)"):
        save_pretrained(model, tmp_path / "folder")
    table = nn.Embedding(3, 3)
    tied = nn.ModuleDict({"q": nn.Linear(3, 3), "k": nn.Linear(3, 3), "table": table})
    tied["q"].weight = table.weight
    with pytest.raises(ValueError, match="the weight of q is another module's, too"):
        add_lora(tied)


def test_a_weight_that_is_read_without_its_layer_is_refused():
    """In eval a layer of torch's encoder reads both weights, and a subclass may do anything."""
    encoder, own = nn.TransformerEncoderLayer(4, 2, 8), nn.ModuleDict({"q": Own(3, 3), "k": nn.Linear(3, 3)})
    for model, layers, kind in ((encoder, "linear1", "Linear"), (encoder, "out_proj", "NonDyn"), (own, ["q"], "Own")):
        with pytest.raises(ValueError, match=f"a {kind}.*, may be read without a call"):
            add_lora(model, layers=layers)


class Own(nn.Linear):
    """A layer of a user."""


def test_a_layer_keeps_the_habits_of_torch():
    """One token without a batch, the argument's name, mixed precision, copies, and the scale in the state dict."""
    model = nn.Sequential(nn.Linear(4, 3))
    add_lora(model, 2, layers="0", alpha=3.0)
    with torch.no_grad():
        model[0].adapter.b.normal_()
    x = torch.randn(4)
    y = model[0](input=x)
    y.sum().backward()
    assert y.shape == (3,)
    assert torch.equal(y, copy.deepcopy(model)(x[None])[0])
    with torch.autocast("cpu", torch.bfloat16):
        low = model(x[None])
        low.sum().backward()
    assert low.dtype == torch.bfloat16
    other = nn.Sequential(nn.Linear(4, 3))
    add_lora(other, 2, layers="0", alpha=7.1)
    other.load_state_dict(model.bfloat16().float().state_dict())
    assert float(other[0].adapter.scale) == 1.5


def test_an_optimizer_refuses_to_go_on_with_adapters_that_were_merged_or_came_later(tmp_path):
    """Else a checkpoint has the update twice, or the adapters stay as they were."""

    def fn(rank, world_size):
        for zero in (dp.DDP, dp.Zero1, dp.Zero3):
            model = adapt(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), layers=["0", "1"])
            optimizer = zero(model)
            with optimizer.gathered():
                merge_lora(model)
            with pytest.raises((ValueError, dp.checkpoint.CheckpointError), match="replaced since"):
                dp.checkpoint.save(tmp_path, 1, optimizer)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        optimizer = dp.Zero1(model)
        add_lora(model, layers=["0"])
        model[1].requires_grad_(True)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(ValueError, match=r"0\.adapter\.a was added since Zero1 took the module"):
            optimizer.step()

    launch(fn, 2)
