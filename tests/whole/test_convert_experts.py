"""Conversions of models with experts, which are single in files and stacked here: there and back, of any plan."""

import json
import math
import shutil

import pytest
import safetensors.torch
import torch
from published import DEEPSEEK, QWEN3_MOE, loaded, written
from test_convert import left, same_folders

import dualpipe_lab as lab
from dualpipe_lab import data, models, train
from dualpipe_lab.dp import checkpoint
from dualpipe_lab.dp.checkpoint import file as files
from dualpipe_lab.dp.checkpoint import reader
from dualpipe_lab.models.pretrained.load import full_shapes, tensors_of

KINDS = {
    "v3": DEEPSEEK | {"dtype": torch.bfloat16},
    "v3, queries without a latent": DEEPSEEK | {"q_lora_rank": None, "dtype": torch.float32},
    "qwen3-moe": QWEN3_MOE | {"mlp_only_layers": [0], "dtype": torch.float32},
}
LATENT = lab.tp.LatentSizes(12, 10, 6, 4, 5)
SMALL = models.V3MoEConfig(hidden_size=16, ffn_size=24, expert_ffn_size=12, num_layers=4, num_heads=2, latent=LATENT)
PLANS = {
    "tp x ep, bf16 with masters": {"tp": 2, "ep": 2, "precision": "bfloat16", "zero": 1},
    "overlapped DualPipe, ZeRO-2": {"pp": 2, "ep": 2, "schedule": "dualpipe", "overlap": True, "zero": 2},
    "experts within dp x cp, ZeRO-3": {"dp": 2, "cp": 2, "ep": 2, "experts_in_data": True, "zero": 3},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return written(KINDS, tmp_path_factory)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of two steps under each plan; after them no bias of a router is 0."""
    found, text = {}, data.frozen_corpus()
    options = {"steps": 2, "sequence_length": 16, "global_batch": 16, "log_every": 0, "bias_speed": 0.1}
    for name, chosen in PLANS.items():
        plan, folder = lab.Plan(num_microbatches=4, **chosen), tmp_path_factory.mktemp("trained") / "saved"
        found[name] = train.run(SMALL, plan, text, folder=folder, **options).checkpoint
    return found


def bytes_of(entry):
    return math.prod(entry.shape) * files.size_of(entry.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_published_experts_become_stacks_and_single_again_to_the_bit(folders, kind, tmp_path):
    done = train.convert(folders[kind], tmp_path / "ours", "checkpoint", max_bytes=10_000)
    stored = models.PretrainedFolder(folders[kind]).tensors
    kept = checkpoint.Checkpoint(done.path)
    kept.verify()
    config = models.config_from_pretrained(folders[kind])
    assert {name.partition("/")[2] for name in kept.names()} == set(full_shapes(config))
    assert (done.num_tensors, done.largest_bytes) == (len(stored), 48 * 32 * stored["lm_head.weight"].dtype.itemsize)
    assert done.num_bytes == sum(map(bytes_of, kept.index.tensors.values()))
    expected = models.PlainV3MoE(config, stored["lm_head.weight"].dtype)
    models.load_pretrained(expected, folders[kind])
    held = dict(tensors_of(train.read_model(done.path)))
    for name, tensor in tensors_of(expected):
        assert torch.equal(held[name], tensor), name
    train.convert(tmp_path / "ours", tmp_path / "back", "published", max_bytes=10_000)
    assert same_folders(folders[kind], tmp_path / "back")
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (folders[kind], tmp_path / "back"))
    changed = {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in first else {}  # no file has such a layer
    assert second == first | changed
    assert left(tmp_path) == ["back", "ours"]


@pytest.mark.parametrize("kind", ["v3", "qwen3-moe"])
def test_torch_has_single_experts_and_its_stacks_are_read_too(folders, kind, tmp_path):
    train.convert(folders[kind], tmp_path / "torch", "torch")
    found = checkpoint.from_torch(tmp_path / "torch", tmp_path / "named", 0)
    assert set(checkpoint.Checkpoint(found).names()) == set(models.PretrainedFolder(folders[kind]).tensors)
    train.convert(tmp_path / "torch", tmp_path / "back", "published", max_bytes=10_000)
    assert same_folders(folders[kind], tmp_path / "back")
    ours = train.convert(tmp_path / "torch", tmp_path / "ours", "checkpoint").path
    checkpoint.to_torch(ours, tmp_path / "stacks")
    train.convert(tmp_path / "stacks", tmp_path / "again", "published")
    assert same_folders(folders[kind], tmp_path / "again")


@pytest.mark.parametrize("name", PLANS)
def test_a_checkpoint_of_any_plan_is_published_and_comes_back_to_the_bit(trained, name, tmp_path):
    done = train.convert(trained[name], tmp_path / "published", "published", max_bytes=10_000)
    expected = train.read_model(trained[name])
    biases = [tensor for one, tensor in tensors_of(expected) if one.endswith("router.bias")]
    assert len(biases) == 3
    assert all(bias.abs().max() > 0.05 for bias in biases)
    there = models.PretrainedFolder(tmp_path / "published")
    for number, bias in enumerate(biases, 1):
        assert torch.equal(there.read(f"model.layers.{number}.mlp.gate.e_score_correction_bias"), bias)
    found = loaded(tmp_path / "published", torch.float32)
    ids = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, expected(ids), rtol=1e-4, atol=1e-5)
    again = train.convert(tmp_path / "published", tmp_path / "again", "checkpoint")
    assert (done.num_tensors, done.num_bytes) == (again.num_tensors, again.num_bytes)
    one, other = checkpoint.Checkpoint(trained[name]), checkpoint.Checkpoint(again.path)
    weights = [name for name in one.names() if name.startswith(("parameter/", "buffer/"))]
    assert set(weights) == set(other.names())
    assert all(torch.equal(one.read(weight), other.read(weight)) for weight in weights)


@pytest.mark.parametrize("to", ["published", "checkpoint", "torch"])
def test_one_expert_is_in_memory_at_a_time(folders, to, tmp_path, monkeypatch):
    """What is read and what is written at once has at most the size of the largest tensor, which stacks exceed."""
    source = train.convert(folders["v3, queries without a latent"], tmp_path / "source", "checkpoint").path
    written, read, on_host, read_range = [], [], files._on_host, reader.read_range

    def writing(tensor):
        written.append(tensor.nbytes)
        return on_host(tensor)

    def reading(file, dtype, begin, end):
        if dtype != torch.uint8:  # not the blocks that are compared with a checksum
            read.append(end - begin)
        return read_range(file, dtype, begin, end)

    monkeypatch.setattr(files, "_on_host", writing)
    monkeypatch.setattr(reader, "read_range", reading)
    done = train.convert(source, tmp_path / "target", to)
    assert max(map(bytes_of, checkpoint.Checkpoint(source).index.tensors.values())) == 2 * done.largest_bytes
    assert max(read) == done.largest_bytes
    assert sum(read) == done.num_bytes
    if to != "torch":  # which writes with its own functions
        assert len(written) == done.num_tensors
        assert max(written) == done.largest_bytes


def test_another_type_leaves_biases_wide_and_experts_of_two_types_are_refused(folders, tmp_path):
    wide = train.convert(folders["v3"], tmp_path / "wide", "checkpoint", dtype="float32")
    narrow = train.convert(wide.path, tmp_path / "narrow", "published", dtype="bfloat16")
    there, back = models.PretrainedFolder(folders["v3"]), models.PretrainedFolder(narrow.path)
    for name, stored in back.tensors.items():
        assert stored.dtype == (torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
        assert torch.equal(back.read(name).to(torch.bfloat16), there.read(name))
    mixed = shutil.copytree(narrow.path, tmp_path / "mixed")
    state = safetensors.torch.load_file(mixed / "model.safetensors")
    state["model.layers.1.mlp.experts.5.up_proj.weight"] = state["model.layers.1.mlp.experts.5.up_proj.weight"].float()
    safetensors.torch.save_file(state, mixed / "model.safetensors")
    with pytest.raises(models.PretrainedError, match=r"experts\.5\.up_proj\.weight is torch.float32, .* give dtype="):
        train.convert(mixed, tmp_path / "target", "checkpoint")
    assert left(tmp_path) == ["mixed", "narrow", "wide"]
    train.convert(mixed, tmp_path / "target", "checkpoint", dtype="float32")
    model = models.PlainV3MoE(models.config_from_pretrained(narrow.path), torch.bfloat16)
    models.load_pretrained(model, narrow.path)
    models.save_pretrained(model, tmp_path / "saved")
    assert same_folders(narrow.path, tmp_path / "saved")


def test_weights_in_fp8_are_converted_as_they_are_read(folders, tmp_path):
    folder = shutil.copytree(folders["v3, queries without a latent"], tmp_path / "fp8")
    states = {file: safetensors.torch.load_file(file) for file in folder.glob("*.safetensors")}
    places = json.loads((folder / "model.safetensors.index.json").read_text())
    for file, state in states.items():
        for name in [name for name in state if ".experts." in name or "self_attn.o_proj" in name]:
            scale = f"{name}_scale_inv"
            state[scale] = 0.5 + torch.rand(*(-(-size // 5) for size in state[name].shape))
            state[name], places["weight_map"][scale] = state[name].to(torch.float8_e4m3fn), file.name
        safetensors.torch.save_file(state, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    values = json.loads((folder / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [5, 5]}
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": fp8}))
    expected = models.PlainV3MoE(models.config_from_pretrained(folder), torch.float32)
    models.load_pretrained(expected, folder)
    held = train.read_model(train.convert(folder, tmp_path / "ours", "checkpoint").path)
    assert all(torch.equal(one, other) for one, other in zip(held.parameters(), expected.parameters(), strict=True))
    train.convert(tmp_path / "ours", tmp_path / "back", "published")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    again = models.PlainV3MoE(expected.config, torch.float32)
    models.load_pretrained(again, tmp_path / "back")
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), expected.parameters(), strict=True))


def test_a_model_without_a_published_form_is_refused(tmp_path):
    folder = tmp_path / "saved"
    options = {"steps": 1, "sequence_length": 8, "global_batch": 2, "log_every": 0}
    train.run(models.V3MoEConfig(num_layers=2), lab.Plan(), data.frozen_corpus(), folder=folder, **options)
    with pytest.raises(models.PretrainedError, match=r"step-00000001 has no published form: .* give it latent="):
        train.convert(folder, tmp_path / "target", "published")
    assert left(tmp_path) == ["saved"]
