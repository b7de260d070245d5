"""Weights in fp8 with a scale for each block: read in slices at any offset, on cuts, and written unquantised."""

import json

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published import DEEPSEEK, YARN, by_our_names, change, close, exact, gradients, loaded, reference
from stage_runs import batch as runs_batch
from stage_runs import build, step

import dualpipe_lab as lab
from dualpipe_lab import models, schedules
from dualpipe_lab.models.pretrained import folder as folders

BLOCKS = (5, 7)  # no divisor of any size here, so that no shard begins where a block does
SCALE = "_scale_inv"
SIZES = DEEPSEEK | {"rope_parameters": YARN, "qk_rope_head_dim": 8}


def is_quantised(name):
    return name.endswith(("proj.weight", "proj_with_mqa.weight"))


def spread(scale, shape, blocks=BLOCKS):
    """The scale of every number of a weight."""
    return scale.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)[: shape[0], : shape[1]]


def quantise(weight, blocks=BLOCKS):
    """A weight in fp8, and the scale of each block: its largest number is the type's largest."""
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, blocks, strict=True))
    padded = torch.zeros(rows * blocks[0], columns * blocks[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scale = padded.unflatten(1, (columns, -1)).unflatten(0, (rows, -1)).abs().amax((1, 3)) / 448
    return (weight.float() / spread(scale, weight.shape, blocks)).to(torch.float8_e4m3fn), scale


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder in fp8 in two files, weights and scales apart, and transformers' model with the same weights."""
    folder = tmp_path_factory.mktemp("fp8") / "v3"
    reference(**SIZES).save_pretrained(folder)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    scales = {}
    for name in filter(is_quantised, list(state)):
        state[name], scales[name + SCALE] = quantise(state[name])
    (folder / "model.safetensors").unlink()
    save(folder, state, scales)
    found = {
        name: value.float() * spread(scales[name + SCALE], value.shape) if name + SCALE in scales else value
        for name, value in state.items()
    }
    assert len(scales) > 50
    path = folder.with_name("plain")
    reference(**SIZES).save_pretrained(path)
    safetensors.torch.save_file(found, path / "model.safetensors", {"format": "pt"})
    return folder, path


def save(folder, state, scales):
    names = {"model-1.safetensors": state, "model-2.safetensors": scales}
    for file, part in names.items():
        safetensors.torch.save_file(part, folder / file)
    index = {"weight_map": {name: file for file, part in names.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*BLOCKS]}
    change(folder / "config.json", lambda values: values.update(quantization_config=config))


def test_one_process_computes_what_transformers_computes_of_the_dequantised_weights(published, tmp_path):
    folder, path = published
    config = models.config_from_pretrained(folder)
    model = models.PlainV3MoE(config, torch.float64)
    models.load_pretrained(model, folder)
    ids, targets = torch.randint(48, (2, 3, 40), generator=torch.Generator().manual_seed(1))
    logits, loss, expected = gradients(exact(loaded(path)), ids, targets)
    close(model(ids).detach(), logits)
    found = model.loss(ids, targets)
    found.backward()
    close(found.detach(), loss)
    for name, grad in by_our_names(expected, config).items():
        close(model.get_parameter(name).grad, grad)
    models.save_pretrained(model, tmp_path / "written")
    assert "quantization_config" not in json.loads((tmp_path / "written/config.json").read_text())
    written, source = models.PretrainedFolder(tmp_path / "written"), models.PretrainedFolder(path)
    assert not written.scales
    assert written.tensors.keys() == source.tensors.keys()
    assert all(torch.equal(written.read(name), source.read(name).double()) for name in source.tensors)
    close(exact(loaded(tmp_path / "written"))(ids).logits.detach(), logits)


CUTS = {  # axes, layout
    "tp x ep": ({"tp": 2, "ep": 2}, None),
    "tp 4": ({"tp": 4}, None),
}


def on_ranks(rank, world_size, folder):
    """In a rank: gradients under every cut, and what was read of the files."""
    config, found, reads, read = models.config_from_pretrained(folder), {}, {}, folders._read

    def recorded(file, name, where):
        reads[cut][name] = where
        return read(file, name, where)

    folders._read = recorded
    for cut, (axes, layout) in CUTS.items():
        mesh = lab.Mesh(lab.Topology(list(axes.items())))
        model = build(config, mesh, schedules.build("1f1b", mesh.size("pp"), 4), layout)
        reads[cut] = {}
        models.load_pretrained(model, folder)
        found[cut] = step(model)
    return found, reads


def test_every_cut_reads_its_slices_alone_and_has_the_gradients_of_transformers(published):
    folder, path = published
    config, there = models.config_from_pretrained(folder), models.PretrainedFolder(folder)
    results = lab.launch(on_ranks, 4, folder, timeout=240)
    for cut, (axes, _) in CUTS.items():
        ids, targets = runs_batch(48, 4, axes.get("ep", 1))
        _, loss, expected = gradients(exact(loaded(path)), ids.flatten(0, 2), targets.flatten(0, 2))
        for found, reads in results:
            close(found[cut].pop("loss"), loss)
            expected_here = by_our_names(expected, config)
            assert found[cut].keys() == expected_here.keys()
            for name, grad in expected_here.items():
                close(found[cut][name], grad)
            of_weights = {name: where for name, where in reads[cut].items() if name in there.scales and where}
            assert of_weights
            for name, where in of_weights.items():
                assert reads[cut][name + SCALE] == there.blocks.scale_slices(where)
    for rank, (_, reads) in enumerate(results):
        name = "model.layers.1.self_attn.q_b_proj.weight"  # 4 heads of 14 rows, blocks of 5 rows
        assert reads["tp 4"][name][0] == slice(14 * rank, 14 * rank + 14)
        assert reads["tp 4"][name + SCALE][0] == slice(14 * rank // 5, -(-(14 * rank + 14) // 5))
        name = "model.layers.1.self_attn.o_proj.weight"  # 20 columns, blocks of 7
        assert reads["tp 4"][name][1] == slice(5 * rank, 5 * rank + 5)
        assert reads["tp 4"][name + SCALE][1] == slice(5 * rank // 7, -(-(5 * rank + 5) // 7))
        experts = {int(name.split(".")[5]) for name in reads["tp x ep"] if ".mlp.experts." in name}
        assert experts in ({0, 1, 2, 3}, {4, 5, 6, 7})


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


@pytest.mark.parametrize("name", BROKEN)
def test_scales_that_do_not_fit_are_refused_and_change_nothing(published, name, tmp_path):
    edit, words = BROKEN[name]
    parts = [safetensors.torch.load_file(published[0] / f"model-{number}.safetensors") for number in (1, 2)]
    edit(*parts)
    (tmp_path / "config.json").write_text((published[0] / "config.json").read_text())
    save(tmp_path, *parts)
    check_refused(tmp_path, words)


def test_fp8_without_a_word_in_the_config_is_refused(published, tmp_path):
    (tmp_path / "config.json").write_text((published[0] / "config.json").read_text())
    save(tmp_path, *[safetensors.torch.load_file(published[0] / f"model-{number}.safetensors") for number in (1, 2)])
    change(tmp_path / "config.json", lambda values: values.pop("quantization_config"))
    check_refused(tmp_path, "has torch.float8_e4m3fn, for which config.json names no scales")


def check_refused(folder, words):
    model = models.PlainV3MoE(models.config_from_pretrained(folder), torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    with pytest.raises(models.PretrainedError, match=words):
        models.load_pretrained(model, folder)
    assert all((parameter == 0.5).all() for parameter in model.parameters())
