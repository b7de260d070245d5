"""DeepSeek-V3 and Qwen3-MoE by their names: beside transformers' models, on cuts, and back; what is refused."""

import json
import shutil
from math import prod

import pytest
import safetensors.torch
import torch
from published import DEEPSEEK, LLAMA3, QWEN3_MOE, YARN, close, exact, gradients, loaded, reference
from stage_runs import batch as runs_batch
from stage_runs import build, step

import dualpipe_lab as lab
from dualpipe_lab import models, schedules
from dualpipe_lab.models.pretrained.load import is_stacked, published_names
from dualpipe_lab.tp.shard import initialize_parameters

PLAIN_YARN = {name: value for name, value in YARN.items() if not name.startswith("mscale")} | {"truncate": False}
KINDS = {
    "v3": DEEPSEEK,
    "queries without a latent": DEEPSEEK
    | {"q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": {"rope_theta": 500.0}},
    "one group, no dense layer": DEEPSEEK
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
    "yarn": DEEPSEEK | {"rope_parameters": YARN, "qk_rope_head_dim": 8},
    "yarn, sharpened by its factor alone": DEEPSEEK | {"rope_parameters": PLAIN_YARN, "qk_rope_head_dim": 8},
    "qwen3-moe": QWEN3_MOE | {"mlp_only_layers": [0]},
    "qwen3-moe, weights that do not sum to 1": QWEN3_MOE | {"norm_topk_prob": False},
    "qwen3-moe, one expert and yarn": QWEN3_MOE
    | {"norm_topk_prob": False, "num_experts_per_tok": 1, "rope_parameters": PLAIN_YARN},
}
IN_PARTS = ("v3", "yarn", "qwen3-moe", "qwen3-moe, weights that do not sum to 1")


def compare(name, grad, expected, config):
    """A gradient by our name, stacked or not, and those by the published names."""
    names = published_names(name, config)
    close(grad, torch.stack([expected[one] for one in names]) if is_stacked(name) else expected[names[0]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder that transformers has written, by kind."""
    found = {}
    for kind, options in KINDS.items():
        found[kind] = tmp_path_factory.mktemp("published") / kind.replace(" ", "-").replace(",", "")
        reference(**options).save_pretrained(found[kind], max_shard_size="40KB" if kind in IN_PARTS else "5GB")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_transformers_gives_its_logits_loss_and_gradients(folders, kind):
    ids, targets = torch.randint(48, (2, 4, 20), generator=torch.Generator().manual_seed(1))
    targets[0, :7] = -100
    logits, loss, expected = gradients(exact(reference(**KINDS[kind])), ids, targets)
    config = models.config_from_pretrained(folders[kind])
    model = models.PlainV3MoE(config, torch.float64)
    models.load_pretrained(model, folders[kind])
    close(model(ids).detach(), logits)
    found = model.loss(ids, targets)
    found.backward()
    close(found.detach(), loss)
    for name, parameter in model.named_parameters():
        compare(name, parameter.grad, expected, config)


CUTS = {  # axes, schedule, edp, layout, options
    "tp x ep": ({"tp": 2, "ep": 2}, "1f1b", None, None, {"sequence_parallel": True}),
    "pp x cp": ({"pp": 2, "cp": 2}, "1f1b", None, "zigzag", {}),
    "tp x cp, recompute": ({"tp": 2, "cp": 2}, "1f1b", None, "zigzag", {"recompute": True}),
    "experts within dp": ({"dp": 2, "tp": 2}, "1f1b", 1, None, {}),
    "DualPipe": ({"pp": 2, "ep": 2}, "dualpipe", None, None, {}),
}


def on_ranks(rank, world_size, folder, target):
    """In a rank: gradients under every cut; what was read is written back first."""
    config, found = models.config_from_pretrained(folder), {}
    for cut, (axes, schedule, edp, layout, options) in CUTS.items():
        mesh = lab.Mesh(lab.Topology(list(axes.items()), edp=edp))
        model = build(config, mesh, schedules.build(schedule, mesh.size("pp"), 4), layout, **options)
        models.load_pretrained(model, folder)
        models.save_pretrained(model, target / cut, max_bytes=20_000)
        found[cut] = step(model)
    return found


@pytest.mark.parametrize("kind", IN_PARTS)
def test_every_cut_has_the_gradients_of_transformers_and_writes_the_same_bits(folders, kind, tmp_path):
    config, there = models.config_from_pretrained(folders[kind]), models.PretrainedFolder(folders[kind])
    results = lab.launch(on_ranks, 4, folders[kind], tmp_path, timeout=240)
    for cut, (axes, *_) in CUTS.items():
        data = prod(size for axis, size in axes.items() if axis in ("dp", "ep"))
        ids, targets = runs_batch(48, 4, data)
        model = exact(reference(**KINDS[kind]))
        _, loss, expected = gradients(model, ids.flatten(0, 2), targets.flatten(0, 2))
        for found in results:
            close(found[cut].pop("loss"), loss)
            for name, grad in found[cut].items():
                compare(name, grad, expected, config)
        back = models.PretrainedFolder(tmp_path / cut)
        assert set(back.tensors) == set(there.tensors)
        assert all(torch.equal(back.read(name), there.read(name)) for name in there.tensors)
        assert models.config_from_pretrained(tmp_path / cut) == config
        assert len({stored.file for stored in back.tensors.values()}) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_is_written(folders, kind, tmp_path):
    model = models.PlainV3MoE(models.config_from_pretrained(folders[kind]), torch.float64)
    models.load_pretrained(model, folders[kind])
    models.save_pretrained(model, tmp_path / "written")
    ids = torch.arange(20).view(2, 10)
    close(exact(loaded(tmp_path / "written"))(ids).logits.detach(), model(ids).detach())


def test_the_layer_of_a_second_token_is_skipped_and_other_layers_are_not(folders, tmp_path):
    folder = tmp_path / "more"
    shutil.copytree(folders["one group, no dense layer"], folder)
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


REFUSED = {
    "another kind of angles": ({"rope_parameters": {"rope_type": "longrope", "factor": 40}}, "by 'longrope'"),
    "Llama's angles": ({"rope_parameters": LLAMA3}, "by 'llama3', which no published model with latents does"),
    "yarn without a length": ({"rope_parameters": {"rope_type": "yarn", "factor": 40}}, "need original_max_position"),
    "yarn with more": ({"rope_parameters": YARN | {"mixture": 2}}, "with mixture, which is not known here"),
    "yarn the wrong way": ({"rope_parameters": YARN | {"beta_fast": 0.5}}, "with beta_slow below beta_fast"),
    "yarn that shortens": ({"rope_parameters": YARN | {"factor": 0.5}}, "by a factor of at least 1"),
    "other pairs": ({"rope_interleave": False}, "rope_interleave=False, which this model does not compute"),
    "weights that do not sum to the scale": ({"norm_topk_prob": False}, "norm_topk_prob=False"),
    "another selection": ({"topk_method": "greedy"}, "topk_method='greedy'"),
    "other scores": ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
    "a tied table": ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    "KV heads": ({"num_key_value_heads": 2}, "every head has its own keys"),
    "a size missing": ({"kv_lora_rank": None}, "needs kv_lora_rank as a whole number, got None"),
    "groups that do not divide": ({"n_group": 3}, "groups divide the experts"),
    "odd positions": ({"qk_rope_head_dim": 3}, "use an even one"),
    "another size": ({"moe_intermediate_size": 13}, "the config asks for"),
    "more experts": ({"n_routed_experts": 12}, "the config asks for|has no tensor"),
    "fewer layers": ({"num_hidden_layers": 2}, "which the model has not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_cannot_be_used_is_refused_and_changes_nothing(folders, name, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(folders["one group, no dense layer"], folder)
    changes, words = REFUSED[name]
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(models.PretrainedError, match=words):
        load_or_keep(folder)


def load_or_keep(folder):
    """Load a folder; after an error, no parameter has changed."""
    model = models.PlainV3MoE(models.config_from_pretrained(folder), torch.float64)
    initialize_parameters(model)
    before = [parameter.clone() for parameter in model.parameters()]
    try:
        models.load_pretrained(model, folder)
    finally:
        assert all(map(torch.equal, before, model.parameters()))


def test_models_without_a_published_form_are_refused(folders, tmp_path):
    with pytest.raises(models.PretrainedError, match="give it latent="):
        models.save_pretrained(models.PlainV3MoE(models.V3MoEConfig()), tmp_path / "grouped")
    config = models.config_from_pretrained(folders["v3"])
    with pytest.raises(models.PretrainedError, match="build it without multi_token"):
        models.save_pretrained(models.PlainMultiToken(config, 0.3), tmp_path / "second")
