"""One file of the whole model at any number of ranks; checkpoints with an optimizer that change the cut."""

import pytest
import torch
from runs import launch
from safetensors.torch import load_file

import dualpipe_lab as lab
from dualpipe_lab.dp.checkpoint import load, save
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.models.llama import Llama
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.plain_llama import PlainLlama
from dualpipe_lab.tp.checkpoint import load_state_dict_file, save_state_dict_file, shard_spec_of
from dualpipe_lab.tp.shard import full_state_dict

SIZES = {"vocabulary_size": 37, "hidden_size": 24, "ffn_size": 30, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}


def saving(rank, world_size, configs):
    for path, config in configs.items():
        save_state_dict_file(Llama(config, lab.Topology([("tp", world_size)]), seed=1), path)


def loading(rank, world_size, configs):
    found = []
    for path, config in configs.items():
        model = Llama(config, lab.Topology([("tp", world_size)]), seed=2)
        load_state_dict_file(model, path)
        found.append(full_state_dict(model))
    return found


def test_a_file_of_any_cut_loads_under_any_other(tmp_path):
    kinds = {"tied": LlamaConfig(**SIZES, tied=True), "own": LlamaConfig(**SIZES)}
    paths = {size: {tmp_path / f"{size}-{kind}": config for kind, config in kinds.items()} for size in (1, 2)}
    for size, configs in paths.items():
        launch(saving, size, configs)
    for first, *others in zip(*paths.values(), strict=True):
        assert all(other.read_bytes() == first.read_bytes() for other in others)
    states = [load_file(path) for path in paths[1]]
    for state, config in zip(states, kinds.values(), strict=True):
        head = {"head.weight": state["embedding.weight"]} if config.tied else {}
        PlainLlama(config).load_state_dict(state | head)
    for size in paths:
        for found in launch(loading, size, paths[2]):
            for ours, state in zip(found, states, strict=True):
                assert ours.keys() == state.keys()
                assert all(torch.equal(ours[name], value) for name, value in state.items())
    assert {path.name for path in tmp_path.iterdir()} == {path.name for some in paths.values() for path in some}


def test_a_file_of_another_model_is_refused(tmp_path):
    launch(saving, 1, {tmp_path / "one": LlamaConfig(**SIZES)})
    for change, message in (
        ({"num_layers": 2}, "differs from the model in .*layers.1.attention.k.weight"),
        ({"ffn_size": 32}, r"gate.weight has shape \(30, 24\), needs 32 along axis 0"),
        ({"hidden_size": 32, "head_size": 6}, r"needs shape \(19, 32\) on this rank, got \(19, 24\)"),
    ):
        with pytest.raises(lab.RankError, match=message):
            launch(loading, 2, {tmp_path / "one": LlamaConfig(**SIZES | change)})


def test_a_checkpoint_with_its_optimizer_changes_the_cut(tmp_path):
    """Trained on tp 2 x dp 2 with ZeRO-1 over dp, loaded on tp 4 and on one rank: the next step is the same."""
    config = LlamaConfig(**SIZES)
    ids = torch.arange(24).view(2, 12) * 5 % 37

    def build(axes):
        mesh = lab.Mesh(lab.Topology(axes))
        model = Llama(config, mesh, dtype=torch.float64)
        return model, Zero1(model, mesh.group("dp"), lr=0.01)

    def step(model, optimizer, here):
        rows = ids[here.rank("dp") :: here.size("dp")]
        optimizer.zero_grad()
        model.loss(rows, (rows + 1) % 37, num_tokens=ids.numel()).backward()
        optimizer.step()
        return full_state_dict(model, model.tp.group)

    def train(rank, world_size):
        model, optimizer = build([("dp", 2), ("tp", 2)])
        step(model, optimizer, model.mesh)
        path = save(tmp_path, 1, optimizer, shard_spec_of=shard_spec_of(model))
        return path, step(model, optimizer, model.mesh)

    def resume(rank, world_size, path, axes):
        model, optimizer = build(axes)
        load(path, optimizer, shard_spec_of=shard_spec_of(model))
        return step(model, optimizer, model.mesh)

    path, expected = launch(train, 4)[0]
    for axes, size in (([("tp", 4)], 4), ([("tp", 1)], 1)):
        for found in launch(resume, size, path, axes):
            for name, value in expected.items():
                assert (found[name] - value).abs().max() < 1e-9, name
