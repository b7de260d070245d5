"""Published weights: beside transformers' own models, on every cut, and back; folders that cannot be used."""

import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from math import prod

import pytest
import torch
from published import LLAMA3, YARN, change, close, cut, exact, gradients, lie, loaded, published_name, reference
from stage_runs import backward, build, step
from stage_runs import batch as runs_batch

import dualpipe_lab as lab
from dualpipe_lab import dp, models, schedules
from dualpipe_lab.models.pretrained.load import full_shapes

KINDS = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama 3.1": {"rope_parameters": LLAMA3},
    "llama, yarn": {"rope_parameters": YARN},
    "qwen3, yarn": {
        "family": "Qwen3",
        "head_dim": 12,
        "rope_parameters": YARN | {"attention_factor": 1.5, "truncate": False},
    },
    "wide heads": {"head_dim": 12},
    "qwen3": {"family": "Qwen3", "head_dim": 8},
    "qwen3, tied": {"family": "Qwen3", "head_dim": 8, "tie_word_embeddings": True},
}


def batch(rows=4, length=40):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(48, (2, rows, length), generator=generator)
    ids[1, 0, :7] = -100
    return ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder that transformers has written, and what its model computes, by kind."""
    found = {}
    for kind, options in KINDS.items():
        folder = tmp_path_factory.mktemp("published") / kind.replace(", ", "-").replace(" ", "-")
        model = reference(**options)
        model.save_pretrained(folder, max_shard_size="20KB" if kind == "llama" else "5GB")
        found[kind] = folder, gradients(exact(model), *batch())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_transformers_gives_its_logits_loss_and_gradients(folders, kind):
    folder, (logits, loss, expected) = folders[kind]
    config = models.config_from_pretrained(folder)
    model = models.PlainLlama(config, torch.float64)
    models.load_pretrained(model, folder)
    ids, targets = batch()
    close(model(ids).detach(), logits)
    found = model.loss(ids, targets)
    found.backward()
    close(found.detach(), loss)
    for name, parameter in model.named_parameters():
        close(parameter.grad, expected[published_name(name)])


TRAINED = {  # axes, schedule, microbatches
    "tp 4, more ranks than KV heads": ({"tp": 4}, "gpipe", 2),
    "dp 2 x tp 2": ({"dp": 2, "tp": 2}, "gpipe", 2),
    "cp 2": ({"cp": 2}, "gpipe", 2),
    "pp 2 x cp 2 x tp 2": ({"pp": 2, "cp": 2, "tp": 2}, "1f1b", 4),
    "DualPipe": ({"pp": 2, "tp": 2}, "dualpipe", 4),
    "ZBV": ({"pp": 2}, "zbv", 4),
}


def trained_on_ranks(rank, world_size, axes, schedule, num_microbatches, folder, target):
    """Raw gradients of one step; what was read is written back first."""
    mesh = lab.Mesh(lab.Topology(list(axes.items())))
    program = schedules.build(schedule, mesh.size("pp"), num_microbatches)
    layout = "zigzag" if mesh.size("cp") > 1 else None
    model = build(models.config_from_pretrained(folder), mesh, program, layout)
    models.load_pretrained(model, folder)
    models.save_pretrained(model, target, max_bytes=30_000)
    return step(model)


@pytest.mark.parametrize("kind", ["llama 3.1", "qwen3, tied"])
@pytest.mark.parametrize("cut", TRAINED)
def test_every_cut_has_the_gradients_of_transformers_and_writes_the_same_bits(folders, cut, kind, tmp_path):
    folder, axes, schedule, number = folders[kind][0], *TRAINED[cut]
    target = tmp_path / "written"
    ids, targets = runs_batch(48, number, axes.get("dp", 1))
    model = exact(reference(**KINDS[kind]))
    _, loss, expected = gradients(model, ids.flatten(0, 2), targets.flatten(0, 2))
    for found in lab.launch(trained_on_ranks, prod(axes.values()), axes, schedule, number, folder, target):
        close(found.pop("loss"), loss)
        for name, grad in found.items():
            close(grad, expected[published_name(name)])
    there, back = models.PretrainedFolder(folder), models.PretrainedFolder(target)
    assert set(back.tensors) == {published_name(name) for name in full_shapes(models.config_from_pretrained(folder))}
    assert all(torch.equal(back.read(name), there.read(name)) for name in back.tensors)
    assert len({stored.file for stored in back.tensors.values()}) > 1
    assert not list(tmp_path.glob("*.part"))


def optimized_on_ranks(rank, world_size, axes, zero, folder, target):
    """One step of AdamW from published weights; what was read is written back first."""
    mesh = lab.Mesh(lab.Topology(list(axes.items())))
    program = schedules.build("gpipe", mesh.size("pp"), 2)
    model = build(models.config_from_pretrained(folder), mesh, program, sequence_parallel=True, recompute=True)
    models.load_pretrained(model, folder)
    units = [list(model.stages.values())] if zero is dp.Zero3 else []
    optimizer = zero(model, *units, mesh, dp.ZeroOptions(dp.Hyperparameters(lr=1e-2)))
    with pytest.raises(ValueError, match="before the optimizer is made"):
        models.load_pretrained(model, folder)
    if zero is dp.Zero3:
        with pytest.raises(ValueError, match=r"inside of `with optimizer\.gathered"):
            models.save_pretrained(model, target)
    gathered = getattr(optimizer, "gathered", nullcontext)
    with gathered():
        models.save_pretrained(model, target)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    with gathered():
        return model.full_state_dict()


@pytest.mark.parametrize("zero", [dp.Ddp, dp.Zero1, dp.Zero3], ids=lambda zero: zero.__name__)
def test_an_optimizer_begins_from_published_weights(folders, zero, tmp_path):
    """Beside AdamW on transformers' model; under sequence parallelism, with recomputation."""
    folder, target = folders["llama 3.1"][0], tmp_path / "written"
    ids, targets = runs_batch(48, 2, 2)
    model = exact(reference(**KINDS["llama 3.1"]))
    gradients(model, ids.flatten(0, 2), targets.flatten(0, 2))
    torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01).step()
    expected = dict(model.named_parameters())
    for found in lab.launch(optimized_on_ranks, 4, {"dp": 2, "tp": 2}, zero, folder, target):
        for name, value in found.items():
            close(value, expected[published_name(name)].detach(), bound=1e-8)
    there, back = models.PretrainedFolder(folder), models.PretrainedFolder(target)
    assert all(torch.equal(back.read(name), there.read(name)) for name in back.tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_write_loads_in_transformers_without_a_key_too_many(folders, kind, tmp_path):
    folder, (logits, _, _) = folders[kind]
    model = models.PlainLlama(models.config_from_pretrained(folder), torch.float64)
    models.load_pretrained(model, folder)
    models.save_pretrained(model, tmp_path / "written")
    close(exact(loaded(tmp_path / "written"))(batch()[0]).logits.detach(), logits)
    assert models.config_from_pretrained(tmp_path / "written") == models.config_from_pretrained(folder)


def cut_file(folder):
    cut(next(folder.glob("model-00002*")))


def config(**fields):
    return lambda folder: change(folder / "config.json", lambda values: values.update(fields))


def only_pickles(folder):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


BROKEN = {
    "a missing file": (lambda f: next(f.glob("model-00002*")).unlink(), "model-00002.*is missing; the index names it"),
    "a cut file": (cut_file, "model-00002.* is cut: .* ends at byte"),
    "an index that lies": (
        lie,
        "model.norm.weight is in .*, and .*index.json places it in",
    ),
    "an index without a map": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "has no weight_map",
    ),
    "a path outside": (
        lambda f: change(f / "model.safetensors.index.json", lambda v: v["weight_map"].update(a="../x.safetensors")),
        "no safetensors file of its folder",
    ),
    "no weights": (lambda f: [file.unlink() for file in f.glob("model*")], "the weights are missing"),
    "pickles": (only_pickles, "nothing is unpickled here"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "another family": (config(architectures=["GPT2LMHeadModel"]), "is of GPT2LMHeadModel; known are"),
    "no family": (config(architectures=None), "names no architecture"),
    "a bias": (config(attention_bias=True), "attention_bias=True, which this model does not compute"),
    "quantised": (config(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "unknown angles": (config(rope_parameters={"rope_type": "longrope"}), "by 'longrope'; known are"),
    "half of yarn": (config(rope_parameters={"rope_type": "yarn"}), "need factor as a number, got None"),
    "half of llama3": (
        config(rope_parameters={"rope_type": "llama3", "factor": 8}),
        "need low_freq_factor as a number, got None",
    ),
    "a size in words": (config(num_key_value_heads="2"), "needs num_key_value_heads as a whole number, got '2'"),
    "a truth for a size": (config(head_dim=True), "needs head_dim as a whole number, got True"),
    "a number in words": (config(rms_norm_eps="small"), "needs rms_norm_eps as a number"),
    "a truth in words": (config(tie_word_embeddings="no"), "needs tie_word_embeddings as true or false"),
    "angles as a list": (config(rope_parameters=[1]), "needs rope_parameters as an object"),
    "a base in words": (config(rope_parameters={"rope_theta": "large"}), "need rope_theta as a number"),
    "a stretch by nothing": (config(rope_parameters=LLAMA3 | {"factor": 0}), "config.json: rotary angles are scaled"),
    "layers that look less far": (config(layer_types=["sliding_attention"] * 4), "has layers of sliding_attention"),
    "a size missing": (config(intermediate_size=None), "needs intermediate_size as a whole number"),
    "heads that do not fit": (config(num_key_value_heads=3), "config.json: "),
    "another size": (config(intermediate_size=41), "the config asks for"),
    "more layers": (config(num_hidden_layers=5), "has no tensor model.layers.4"),
    "fewer layers": (config(num_hidden_layers=3), "which the model has not"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_folder_that_cannot_be_used_is_refused_by_name_and_changes_nothing(folders, name, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(folders["llama"][0], folder)
    config = models.config_from_pretrained(folder)
    spoil, words = BROKEN[name]
    spoil(folder)
    try:
        config = models.config_from_pretrained(folder)
    except models.PretrainedError as error:
        text = str(error)
    else:
        model = models.PlainLlama(config, torch.float64)
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(models.PretrainedError) as found:
            models.load_pretrained(model, folder)
        text = str(found.value)
        assert all(map(torch.equal, before, model.parameters()))
    assert re.search(words, text), text


def test_a_folder_of_another_type_is_refused(tmp_path):
    reference(dtype=torch.float32).to(torch.float8_e4m3fn).save_pretrained(tmp_path / "fp8")
    model = models.PlainLlama(models.config_from_pretrained(tmp_path / "fp8"), torch.float32)
    with pytest.raises(models.PretrainedError, match=r"float8_e4m3fn, for which config\.json names no scales"):
        models.load_pretrained(model, tmp_path / "fp8")


def test_a_folder_that_is_there_is_not_overwritten(folders, tmp_path):
    model = models.PlainLlama(models.config_from_pretrained(folders["llama"][0]), torch.float64)
    (tmp_path / "full").mkdir()
    with pytest.raises(models.PretrainedError, match="is there already"):
        models.save_pretrained(model, tmp_path / "full")


def test_a_disk_that_fails_leaves_no_half_of_a_model(folders, monkeypatch):
    folder = folders["llama"][0]
    model = models.PlainLlama(models.config_from_pretrained(folder), torch.float64)
    read, seen = models.PretrainedFolder.read, []

    def failing(self, name, where=()):
        seen.append(name)
        if len(seen) == 9:
            raise OSError(5, "Input/output error")
        return read(self, name, where)

    monkeypatch.setattr(models.PretrainedFolder, "read", failing)
    with pytest.raises(OSError, match="Input/output"):
        models.load_pretrained(model, folder)
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_a_head_size_may_be_given_or_follow(folders):
    config = models.config_from_pretrained(folders["llama"][0])
    assert config.head_size is not None
    models.load_pretrained(models.PlainLlama(replace(config, head_size=None), torch.float64), folders["llama"][0])


def test_a_model_of_other_sizes_is_refused(folders):
    with pytest.raises(models.PretrainedError, match="build it from config_from_pretrained"):
        models.load_pretrained(models.PlainLlama(models.LlamaConfig(), torch.float64), folders["llama"][0])
