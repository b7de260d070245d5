"""Weights in fp8 with a scale for each block: read in slices at any offset, on cuts, and written unquantised."""

import json

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published import (
    DEEPSEEK,
    SCALE,
    YARN,
    by_our_names,
    change,
    close,
    exact,
    gradients,
    loaded,
    quantise,
    read,
    reference,
    save_fp8,
    spread,
    written_in_fp8,
)
from stage_runs import batch as runs_batch
from stage_runs import build, step

import dualpipe_lab as lab
from dualpipe_lab import models, schedules, train

SIZES = DEEPSEEK | {"rope_parameters": YARN, "qk_rope_head_dim": 8}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder in fp8 in two files, weights and scales apart, and transformers' model with the same weights."""
    folder = tmp_path_factory.mktemp("fp8") / "v3"
    found, path = written_in_fp8(folder, SIZES), folder.with_name("plain")
    reference(**SIZES).save_pretrained(path)
    safetensors.torch.save_file(found, path / "model.safetensors", {"format": "pt"})
    return folder, path


def test_one_process_computes_what_transformers_computes_of_the_dequantised_weights(published, tmp_path):
    folder, path = published
    model = read(folder)
    ids, targets = torch.randint(48, (2, 3, 40), generator=torch.Generator().manual_seed(1))
    logits, loss, expected = gradients(exact(loaded(path)), ids, targets)
    close(model(ids).detach(), logits)
    found = model.loss(ids, targets)
    found.backward()
    close(found.detach(), loss)
    for name, grad in by_our_names(expected, model.config).items():
        close(model.get_parameter(name).grad, grad)
    models.save_pretrained(model, tmp_path / "written")
    assert "quantization_config" not in json.loads((tmp_path / "written/config.json").read_text())
    written, source = models.PretrainedFolder(tmp_path / "written"), models.PretrainedFolder(path)
    assert not written.scales
    assert written.tensors.keys() == source.tensors.keys()
    assert all(torch.equal(written.read(name), source.read(name).double()) for name in source.tensors)
    close(exact(loaded(tmp_path / "written"))(ids).logits.detach(), logits)
    ours = train.convert(folder, tmp_path / "ours", "checkpoint")
    train.convert(ours.path, tmp_path / "back", "published")
    assert all(map(torch.equal, read(tmp_path / "back").parameters(), model.parameters()))


CUTS = [{"tp": 2, "ep": 2}, {"tp": 4}]


def on_ranks(rank, world_size, folder):
    """In a rank: gradients under every cut."""
    found = []
    for axes in CUTS:
        mesh = lab.Mesh(lab.Topology(list(axes.items())))
        model = build(models.config_from_pretrained(folder), mesh, schedules.build("1f1b", 1, 4))
        models.load_pretrained(model, folder)
        found.append(step(model))
    return found


def test_every_cut_has_the_gradients_of_transformers(published):
    folder, path = published
    results = lab.launch(on_ranks, 4, folder, timeout=240)
    for number, axes in enumerate(CUTS):
        ids, targets = runs_batch(48, 4, axes.get("ep", 1))
        _, loss, grads = gradients(exact(loaded(path)), ids.flatten(0, 2), targets.flatten(0, 2))
        expected = by_our_names(grads, models.config_from_pretrained(folder)) | {"loss": loss}
        for found in results:
            assert found[number].keys() == expected.keys()
            for name, value in expected.items():
                close(found[number][name], value)


@settings(max_examples=40)
@given(st.data())
def test_any_slice_equals_the_slice_of_the_full_weight(tmp_path_factory, data):
    shape = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 20)), "shape")
    blocks = data.draw(st.tuples(st.integers(1, 8), st.integers(1, 8)), "blocks")
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2), "ends")) for size in shape]
    folder = tmp_path_factory.mktemp("slices")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)) + 2
    stored, scale = quantise(weight, blocks)
    safetensors.torch.save_file({"w": stored, "w" + SCALE: scale}, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [*blocks]}}
    (folder / "config.json").write_text(json.dumps(config))
    full = stored.float() * spread(scale, shape, blocks)
    there = models.PretrainedFolder(folder)
    assert torch.equal(there.read("w"), full)
    where = tuple(slice(*part) for part in ends)
    assert torch.equal(there.read("w", where), full[where])


METHODS = {
    "another method": {"quant_method": "gptq", "bits": 4},
    "no method": {"weight_block_size": [128, 128]},
    "no blocks": {"quant_method": "fp8"},
    "a scale for each row": {"quant_method": "fp8", "weight_block_size": [1]},
    "blocks of nothing": {"quant_method": "fp8", "weight_block_size": [128, 0]},
    "another type": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"},
    "scales of activations": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
    "no object": "fp8",
}


@pytest.mark.parametrize("name", METHODS)
def test_other_quantisation_is_refused_by_the_folder_and_sizes_are_read(published, name, tmp_path):
    (tmp_path / "config.json").write_text((published[0] / "config.json").read_text())
    plain = models.config_from_pretrained(tmp_path)
    change(tmp_path / "config.json", lambda values: values.update(quantization_config=METHODS[name]))
    safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    assert models.config_from_pretrained(tmp_path) == plain
    with pytest.raises(models.PretrainedError, match=r"config\.json (has|needs).* quantization_config"):
        models.PretrainedFolder(tmp_path)


NAME = "model.layers.1.mlp.experts.3.up_proj.weight"  # 12 x 32: 3 x 5 blocks
BROKEN = {
    "a scale missing": (
        lambda state, scales: scales.pop(NAME + SCALE),
        rf"model-1\.safetensors: {NAME} is in fp8, and no file has its scales {NAME}{SCALE}",
    ),
    "a scale of another shape": (
        lambda state, scales: scales.update({NAME + SCALE: torch.ones(3, 4)}),
        rf"model-2\.safetensors: {NAME}{SCALE} has torch.float32 of shape \(3, 4\).* of \(3, 5\)",
    ),
    "a scale of another type": (
        lambda state, scales: scales.update({NAME + SCALE: torch.ones(3, 5, dtype=torch.float16)}),
        rf"model-2\.safetensors: {NAME}{SCALE} has torch.float16",
    ),
    "a scale left over": (
        lambda state, scales: state.update({NAME: state[NAME].float()}),
        rf"model-2\.safetensors has {NAME}{SCALE}, and no file has {NAME} in fp8",
    ),
    "a vector in fp8": (
        lambda state, scales: (
            state.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}),
            scales.update({"model.norm.weight" + SCALE: torch.ones(1)}),
        ),
        r"model-1\.safetensors: model\.norm\.weight is in fp8 with shape \(32,\)",
    ),
    "another type of 8 bits": (
        lambda state, scales: (
            state.update({NAME: state[NAME].float().to(torch.float8_e5m2)}),
            scales.pop(NAME + SCALE),
        ),
        rf"model-1\.safetensors: {NAME} has torch.float8_e5m2, for which config.json names no scales",
    ),
}


BROKEN["no word in the config"] = (
    lambda state, scales: None,
    "has torch.float8_e4m3fn, for which config.json names no scales",
)


@pytest.mark.parametrize("name", BROKEN)
def test_scales_that_do_not_fit_are_refused_and_change_nothing(published, name, tmp_path):
    edit, words = BROKEN[name]
    parts = [safetensors.torch.load_file(published[0] / f"model-{number}.safetensors") for number in (1, 2)]
    edit(*parts)
    (tmp_path / "config.json").write_text((published[0] / "config.json").read_text())
    save_fp8(tmp_path, *parts)
    if name == "no word in the config":
        change(tmp_path / "config.json", lambda values: values.pop("quantization_config"))
    model = models.PlainV3MoE(models.config_from_pretrained(tmp_path), torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    with pytest.raises(models.PretrainedError, match=words):
        models.load_pretrained(model, tmp_path)
    assert all((parameter == 0.5).all() for parameter in model.parameters())
