"""Published weights: beside transformers' own models, on every cut, and back; folders that cannot be used."""

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from math import prod

import pytest
import safetensors.torch
import torch
from published import (
    DEEPSEEK,
    LLAMA3,
    QWEN3_MOE,
    YARN,
    by_our_names,
    change,
    close,
    cut,
    exact,
    gradients,
    lie,
    loaded,
    plain,
    reference,
)
from stage_runs import backward, build, step
from stage_runs import batch as runs_batch

import dualpipe_lab as lab
from dualpipe_lab import dp, models, schedules
from dualpipe_lab.tp.shard import initialize_parameters

PLAIN_YARN = {name: value for name, value in YARN.items() if not name.startswith("mscale")}
DENSE = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama 3.1": {"rope_parameters": LLAMA3},
    "llama, yarn": {"rope_parameters": YARN},
    "qwen3, yarn": {
        "family": "Qwen3",
        "head_dim": 12,
        "rope_parameters": PLAIN_YARN,
    },
    "wide heads": {"head_dim": 12},
    "qwen3": {"family": "Qwen3", "head_dim": 8},
    "qwen3, tied": {"family": "Qwen3", "head_dim": 8, "tie_word_embeddings": True},
}
ROUTED = {
    "v3": DEEPSEEK,
    "queries without a latent": DEEPSEEK
    | {"q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": {"rope_theta": 500.0}},
    "one group, no dense layer": DEEPSEEK
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
    "v3, yarn": DEEPSEEK | {"rope_parameters": YARN, "qk_rope_head_dim": 8},
    "v3, yarn sharpened by its factor alone": DEEPSEEK | {"rope_parameters": PLAIN_YARN, "qk_rope_head_dim": 8},
    "qwen3-moe": QWEN3_MOE | {"mlp_only_layers": [0]},
    "qwen3-moe, weights that do not sum to 1": QWEN3_MOE | {"norm_topk_prob": False},
    "qwen3-moe, one expert and yarn": QWEN3_MOE
    | {"norm_topk_prob": False, "num_experts_per_tok": 1, "rope_parameters": PLAIN_YARN},
}
KINDS = DENSE | ROUTED
IN_PARTS = (
    "llama", "llama 3.1", "qwen3, tied", "v3", "v3, yarn", "qwen3-moe", "qwen3-moe, weights that do not sum to 1",
)  # fmt: skip


def batch(rows=2, length=40):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(48, (2, rows, length), generator=generator)
    ids[1, 0, :7] = -100
    return ids


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """By kind: a folder that transformers has written, and logits, loss and gradients of its model."""

    @cache
    def of(kind):
        folder, model = tmp_path_factory.mktemp("published") / "model", reference(**KINDS[kind])
        model.save_pretrained(folder, max_shard_size="20KB" if kind in IN_PARTS else "5GB")
        return folder, gradients(exact(model), *batch())

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_numbers_of_transformers_and_transformers_loads_what_is_written(published, kind, tmp_path):
    folder, (logits, loss, expected) = published(kind)
    config = models.config_from_pretrained(folder)
    model, grads = plain(config), by_our_names(expected, config)
    models.load_pretrained(model, folder)
    ids, targets = batch()
    close(model(ids).detach(), logits)
    found = model.loss(ids, targets)
    found.backward()
    close(found.detach(), loss)
    for name, parameter in model.named_parameters():
        close(parameter.grad, grads[name])
    models.save_pretrained(model, tmp_path / "written")
    close(exact(loaded(tmp_path / "written"))(ids).logits.detach(), logits)
    assert models.config_from_pretrained(tmp_path / "written") == config


DENSE_CUTS = {  # axes, schedule, edp, layout, options
    "tp 4, more ranks than KV heads": ({"tp": 4}, "gpipe", None, None, {}),
    "dp x tp": ({"dp": 2, "tp": 2}, "gpipe", None, None, {}),
    "pp x cp": ({"pp": 2, "cp": 2}, "1f1b", None, "zigzag", {}),
    "DualPipe": ({"pp": 2, "tp": 2}, "dualpipe", None, None, {}),
    "ZBV": ({"pp": 2, "dp": 2}, "zbv", None, None, {}),
}
ROUTED_CUTS = {
    "tp x ep": ({"tp": 2, "ep": 2}, "1f1b", None, None, {"sequence_parallel": True}),
    "pp x cp": ({"pp": 2, "cp": 2}, "1f1b", None, "zigzag", {}),
    "tp x cp, recompute": ({"tp": 2, "cp": 2}, "1f1b", None, "zigzag", {"recompute": True}),
    "experts within dp": ({"dp": 2, "tp": 2}, "1f1b", 1, None, {}),
    "DualPipe": ({"pp": 2, "ep": 2}, "dualpipe", None, None, {}),
}


def on_ranks(rank, world_size, folder, target, cuts):
    """In a rank: gradients under every cut; what was read is written back first."""
    config, found = models.config_from_pretrained(folder), {}
    for name, (axes, schedule, edp, layout, options) in cuts.items():
        mesh = lab.Mesh(lab.Topology(list(axes.items()), edp=edp))
        model = build(config, mesh, schedules.build(schedule, mesh.size("pp"), 4), layout, **options)
        models.load_pretrained(model, folder)
        models.save_pretrained(model, target / name, max_bytes=20_000)
        found[name] = step(model)
    return found


@pytest.mark.parametrize("kind", ["llama 3.1", "qwen3, tied"])
def test_every_cut_has_the_gradients_of_transformers_and_writes_the_same_bits(published, kind, tmp_path, some):
    check_cuts(published(kind)[0], kind, tmp_path, some(DENSE_CUTS, 3))


@pytest.mark.parametrize("kind", [kind for kind in IN_PARTS if kind in ROUTED])
def test_every_cut_of_experts_has_these_gradients_and_writes_the_same_bits(published, kind, tmp_path, some):
    check_cuts(published(kind)[0], kind, tmp_path, some(ROUTED_CUTS, 3))


def check_cuts(folder, kind, tmp_path, cuts):
    config, there = models.config_from_pretrained(folder), models.PretrainedFolder(folder)
    results, model = lab.launch(on_ranks, 4, folder, tmp_path, cuts, timeout=240), exact(reference(**KINDS[kind]))
    for case, (axes, *_) in cuts.items():
        data = prod(size for axis, size in axes.items() if axis in ("dp", "ep"))
        _, loss, grads = gradients(model, *(part.flatten(0, 2) for part in runs_batch(48, 4, data)))
        expected = by_our_names(grads, config)
        for found in results:
            close(found[case].pop("loss"), loss)
            for name, grad in found[case].items():
                close(grad, expected[name])
        back = models.PretrainedFolder(tmp_path / case)
        assert set(back.tensors) == set(there.tensors)
        assert all(torch.equal(back.read(name), there.read(name)) for name in there.tensors)
        assert models.config_from_pretrained(tmp_path / case) == config
        assert len({stored.file for stored in back.tensors.values()}) > 1
    assert not list(tmp_path.glob("*.part"))


def optimized_on_ranks(rank, world_size, axes, zero, folder, target):
    """One step of AdamW from published weights; what was read is written back first."""
    mesh = lab.Mesh(lab.Topology(list(axes.items())))
    program = schedules.build("gpipe", mesh.size("pp"), 2)
    model = build(models.config_from_pretrained(folder), mesh, program, sequence_parallel=True, recompute=True)
    models.load_pretrained(model, folder)
    units = {"units": list(model.stages.values())} if zero is dp.Zero3 else {}
    optimizer = zero(model, mesh, **units, lr=1e-2, reduce="sum")
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


@pytest.mark.parametrize("zero", [dp.DDP, dp.Zero1, dp.Zero3], ids=lambda zero: zero.__name__)
def test_an_optimizer_begins_from_published_weights(published, zero, tmp_path):
    """Beside AdamW on transformers' model; under sequence parallelism, with recomputation."""
    folder, target = published("llama 3.1")[0], tmp_path / "written"
    ids, targets = runs_batch(48, 2, 2)
    model = exact(reference(**KINDS["llama 3.1"]))
    gradients(model, ids.flatten(0, 2), targets.flatten(0, 2))
    torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01).step()
    expected = by_our_names(dict(model.named_parameters()), models.config_from_pretrained(folder))
    for found in lab.launch(optimized_on_ranks, 4, {"dp": 2, "tp": 2}, zero, folder, target):
        for name, value in found.items():
            close(value, expected[name].detach(), bound=1e-8)
    there, back = models.PretrainedFolder(folder), models.PretrainedFolder(target)
    assert all(torch.equal(back.read(name), there.read(name)) for name in back.tensors)


def cut_file(folder):
    cut(next(folder.glob("model-00002*")))


def config(**fields):
    return lambda folder: change(folder / "config.json", lambda values: values.update(fields))


def only_pickles(folder):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def narrow(folder):
    """Store the last norm in 8 bits, which are no weights without their scales."""
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    file = folder / places["model.norm.weight"]
    state = safetensors.torch.load_file(file)
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.float8_e4m3fn)
    safetensors.torch.save_file(state, file)


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
    "another family": (
        config(architectures=["GPT2LMHeadModel"]),
        r"needs one architecture of LlamaForCausalLM, .* got architectures=\['GPT2LM",
    ),
    "no family": (config(architectures=None), "needs one architecture of .* got architectures=None"),
    "a bias": (config(attention_bias=True), "attention_bias=True, which this model does not compute"),
    "unknown angles": (config(rope_parameters={"rope_type": "longrope"}), "by 'longrope'; known are"),
    "half of yarn": (config(rope_parameters={"rope_type": "yarn"}), "need factor as a number, got None"),
    "a size in words": (config(num_key_value_heads="2"), "needs num_key_value_heads as a whole number, got '2'"),
    "a number in words": (config(rms_norm_eps="small"), "needs rms_norm_eps as a number"),
    "a truth in words": (config(tie_word_embeddings="no"), "needs tie_word_embeddings as true or false"),
    "angles as a list": (config(rope_parameters=[1]), "needs rope_parameters as an object"),
    "a stretch by nothing": (config(rope_parameters=LLAMA3 | {"factor": 0}), "config.json: rotary angles are scaled"),
    "layers that look less far": (config(layer_types=["sliding_attention"] * 4), "has layers of sliding_attention"),
    "heads that do not fit": (config(num_key_value_heads=3), "config.json: "),
    "another size": (config(intermediate_size=41), "the config asks for"),
    "quantised": (config(quantization_config={"quant_method": "fp8"}), "weights are quantised.* to bfloat16 first"),
    "8 bits": (narrow, r"norm.weight has torch.float8_e4m3fn; convert the folder to bfloat16 first"),
    "more layers": (config(num_hidden_layers=5), "has no tensor model.layers.4"),
    "fewer layers": (config(num_hidden_layers=3), "which the model has not"),
}


ROUTED_BROKEN = {
    "another kind of angles": ({"rope_parameters": {"rope_type": "longrope", "factor": 40}}, "by 'longrope'"),
    "Llama's angles": ({"rope_parameters": LLAMA3}, "by 'llama3', which no published model with latents does"),
    "yarn without a length": ({"rope_parameters": {"rope_type": "yarn", "factor": 40}}, "need original_max_position"),
    "yarn with more": ({"rope_parameters": YARN | {"attention_factor": 2}}, "attention_factor=2, which is not known"),
    "yarn the wrong way": ({"rope_parameters": YARN | {"beta_fast": 0.5}}, "with beta_slow at most beta_fast"),
    "yarn that shortens": ({"rope_parameters": YARN | {"factor": 0.5}}, "by a factor of at least 1"),
    "other pairs": ({"rope_interleave": False}, "rope_interleave=False, which this model does not compute"),
    "weights that do not sum to the scale": ({"norm_topk_prob": False}, "norm_topk_prob=False"),
    "another selection": ({"topk_method": "greedy"}, "topk_method='greedy'"),
    "other scores": ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
    "a tied table": ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    "key heads": ({"num_key_value_heads": 2}, "every head has its own keys"),
    "a size missing": ({"kv_lora_rank": None}, "needs kv_lora_rank as a whole number, got None"),
    "groups that do not divide": ({"n_group": 3}, "groups divide the experts"),
    "odd positions": ({"qk_rope_head_dim": 3}, "use an even one"),
    "another size": ({"moe_intermediate_size": 13}, "the config asks for"),
    "more experts": ({"n_routed_experts": 12}, "the config asks for|has no tensor"),
    "fewer layers": ({"num_hidden_layers": 2}, "which the model has not"),
}


CASES = [("llama", *row) for row in BROKEN.values()]
CASES += [("one group, no dense layer", config(**values), words) for values, words in ROUTED_BROKEN.values()]


@pytest.mark.parametrize(("kind", "spoil", "words"), CASES, ids=[*BROKEN, *(f"{name}, v3" for name in ROUTED_BROKEN)])
def test_a_folder_that_cannot_be_used_is_refused_by_name_and_changes_nothing(published, kind, spoil, words, tmp_path):
    folder = shutil.copytree(published(kind)[0], tmp_path / "broken")
    spoil(folder)
    try:
        model = plain(models.config_from_pretrained(folder))
    except models.PretrainedError as error:
        text = str(error)
    else:
        initialize_parameters(model)
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(models.PretrainedError) as found:
            models.load_pretrained(model, folder)
        text = str(found.value)
        assert all(map(torch.equal, before, model.parameters()))
    assert re.search(words, text), text


def test_the_layer_of_a_second_token_is_skipped_and_other_layers_are_not(published, tmp_path):
    folder = tmp_path / "more"
    shutil.copytree(published("one group, no dense layer")[0], folder)
    config = models.config_from_pretrained(folder)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    state |= {
        "model.layers.3.embed_tokens.weight": torch.zeros(48, 32),
        "model.layers.3.eh_proj.weight": torch.zeros(32),
    }
    safetensors.torch.save_file(state, folder / "model.safetensors")
    models.load_pretrained(models.PlainV3MoE(config, torch.float64), folder)
    del state["model.layers.3.eh_proj.weight"]
    safetensors.torch.save_file(state, folder / "model.safetensors")
    with pytest.raises(
        models.PretrainedError, match=r"has model\.layers\.3\.embed_tokens\.weight, which the model has not"
    ):
        models.load_pretrained(models.PlainV3MoE(config, torch.float64), folder)


def test_a_disk_that_fails_leaves_no_half_of_a_model(published, monkeypatch):
    folder = published("llama")[0]
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


def test_models_that_do_not_fit_are_refused_and_a_head_size_may_follow(published, tmp_path):
    folder, there = published("llama")[0], tmp_path / "there"
    config, routed = (models.config_from_pretrained(published(kind)[0]) for kind in ("llama", "v3"))
    there.mkdir()
    for refused, message in (
        (lambda: models.save_pretrained(plain(config), there), "is there already"),
        (lambda: models.save_pretrained(plain(models.V3MoEConfig()), tmp_path / "grouped"), "give it latent="),
        (lambda: models.save_pretrained(models.PlainMTP(routed, 0.3), tmp_path / "second"), "build it without mtp"),
        (lambda: models.load_pretrained(plain(models.LlamaConfig()), folder), "build it from config_from_pretrained"),
    ):
        with pytest.raises(models.PretrainedError, match=message):
            refused()
    assert config.head_size is not None
    models.load_pretrained(plain(replace(config, head_size=None)), folder)
