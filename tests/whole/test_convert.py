"""Conversions: there and back to the bit, of any plan, expert by expert; what cannot be used leaves nothing behind."""

import json
import math
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from published import DEEPSEEK, LLAMA3, QWEN3_MOE, change, cut, loaded, read, written

import dualpipe_lab as lab
from dualpipe_lab import data, models, train
from dualpipe_lab.dp import checkpoint
from dualpipe_lab.dp.checkpoint import file as files
from dualpipe_lab.dp.checkpoint import reader
from dualpipe_lab.models.parameters import full_parameters
from dualpipe_lab.models.pretrained.load import tensors_of

KINDS = {
    "llama 3.1": {"rope_parameters": LLAMA3, "dtype": torch.bfloat16},
    "qwen3, tied": {"family": "Qwen3", "head_dim": 8, "tie_word_embeddings": True, "dtype": torch.float32},
    "v3": DEEPSEEK | {"dtype": torch.bfloat16},
    "v3, queries without a latent": DEEPSEEK | {"q_lora_rank": None, "dtype": torch.float32},
    "qwen3-moe": QWEN3_MOE | {"mlp_only_layers": [0], "dtype": torch.float32},
}
SIZES = {"hidden_size": 16, "ffn_size": 24, "num_heads": 2}
LLAMA = models.LlamaConfig(**SIZES, num_layers=2, num_kv_heads=1, qk_norm=True)
V3 = models.V3MoEConfig(**SIZES, num_layers=4, expert_ffn_size=12, latent=lab.tp.LatentSizes(12, 10, 6, 4, 5))
PLANS = {
    "dense, bf16 with masters": (LLAMA, {"pp": 2, "tp": 2, "precision": "bfloat16"}),
    "tp x ep, bf16 with masters": (V3, {"tp": 2, "ep": 2, "precision": "bfloat16", "zero": 1}),
    "overlapped DualPipe": (V3, {"pp": 2, "ep": 2, "schedule": "dualpipe", "overlap": True, "zero": 2}),
    "experts within dp x cp": (V3, {"dp": 2, "cp": 2, "ep": 2, "experts_in_data": True, "zero": 3}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return written(KINDS, tmp_path_factory)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of two steps under each plan; after them no bias of a router is 0."""
    found, text = {}, data.frozen_corpus()
    options = {"steps": 2, "sequence_length": 16, "global_batch": 16, "log_every": 0, "bias_speed": 0.1}
    for name, (config, chosen) in PLANS.items():
        plan, folder = lab.Plan(num_microbatches=4, **chosen), tmp_path_factory.mktemp("trained") / "saved"
        found[name] = train.run(config, plan, text, folder=folder, **options).checkpoint
    return found


def same_folders(one, other):
    there, back = models.PretrainedFolder(one), models.PretrainedFolder(other)
    assert there.tensors.keys() == back.tensors.keys()
    for name, stored in there.tensors.items():
        assert stored[1:] == back.tensors[name][1:], name
        assert torch.equal(there.read(name), back.read(name)), name
    return True


def with_tensors(source, target, **changes):
    """Copy a folder into one of one file, with some tensors changed or added, each made of the others."""
    there = models.PretrainedFolder(source)
    state = {name: there.read(name) for name in there.tensors}
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    shutil.copy(source / "config.json", target)
    safetensors.torch.save_file(
        state | {name: change(state) for name, change in changes.items()}, target / "model.safetensors"
    )
    return target


def left(folder):
    """What lies in a folder, or beside it."""
    return sorted(path.name for path in folder.iterdir())


def equal(found, expected):
    """Whether two models have the same tensors, biases of routers among them."""
    held = dict(tensors_of(found))
    return all(torch.equal(held.pop(name), tensor) for name, tensor in tensors_of(expected)) and not held


def bytes_of(entry):
    return math.prod(entry.shape) * files.size_of(entry.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_folder_becomes_a_checkpoint_and_is_published_again_to_the_bit(folders, kind, tmp_path):
    """Experts are single in files and stacked in a checkpoint."""
    done = train.convert(folders[kind], tmp_path / "ours", "checkpoint", max_bytes=10_000)
    assert (done.source, done.target) == ("published", "checkpoint")
    assert done.path == checkpoint.latest(tmp_path / "ours")
    assert len(list(done.path.glob("*.safetensors"))) > 2
    kept, stored = checkpoint.Checkpoint(done.path), models.PretrainedFolder(folders[kind]).tensors
    kept.verify()
    dtype = KINDS[kind]["dtype"]
    assert {name.partition("/")[2] for name in kept.names()} == set(
        full_parameters(models.config_from_pretrained(folders[kind]))
    )
    assert (done.num_tensors, done.largest_bytes) == (len(stored), 48 * 32 * dtype.itemsize)
    assert done.num_bytes == sum(map(bytes_of, kept.index.tensors.values()))
    assert equal(train.read_model(done.path), read(folders[kind], dtype))
    train.convert(tmp_path / "ours", tmp_path / "back", "published", max_bytes=10_000)
    assert same_folders(folders[kind], tmp_path / "back")
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (folders[kind], tmp_path / "back"))
    changed = {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in first else {}  # no file has such a layer
    assert second == first | changed  # what this library does not use, such as the ids of special tokens, is kept
    assert left(tmp_path) == ["back", "ours"]


def test_checkpoints_of_all_plans_are_published_and_come_back_to_the_bit(trained, tmp_path, subtests):
    for name in PLANS:
        with subtests.test(name=name):
            publish_and_back(trained, name, tmp_path / name)


def publish_and_back(trained, name, tmp_path):
    done = train.convert(trained[name], tmp_path / "published", "published", max_bytes=10_000)
    expected = train.read_model(trained[name])
    biases = [tensor for one, tensor in tensors_of(expected) if one.endswith("router.bias")]
    assert len(biases) == (3 if PLANS[name][0] is V3 else 0)
    there = models.PretrainedFolder(tmp_path / "published")
    for number, bias in enumerate(biases, 1):
        assert bias.abs().max() > 0.05
        assert torch.equal(there.read(f"model.layers.{number}.mlp.gate.e_score_correction_bias"), bias)
    found = loaded(tmp_path / "published", torch.float32)
    ids = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, expected(ids), rtol=1e-4, atol=1e-5)
    again = train.convert(tmp_path / "published", tmp_path / "again", "checkpoint")
    assert (done.num_tensors, done.num_bytes) == (again.num_tensors, again.num_bytes)
    assert equal(train.read_model(again.path), expected)


@pytest.mark.parametrize("to", ["published", "checkpoint"])
def test_one_expert_is_in_memory_at_a_time(folders, to, tmp_path, monkeypatch):
    """What is read and what is written at once has at most the size of the largest tensor, which stacks exceed."""
    source = train.convert(folders["v3, queries without a latent"], tmp_path / "source", "checkpoint").path
    sizes, reads, on_host, read_range = [], [], files._on_host, reader.read_range

    def writing(tensor):
        sizes.append(tensor.nbytes)
        return on_host(tensor)

    def reading(file, dtype, begin, end):
        if dtype != torch.uint8:  # not the blocks that are compared with a checksum
            reads.append(end - begin)
        return read_range(file, dtype, begin, end)

    monkeypatch.setattr(files, "_on_host", writing)
    monkeypatch.setattr(reader, "read_range", reading)
    done = train.convert(source, tmp_path / "target", to)
    assert max(map(bytes_of, checkpoint.Checkpoint(source).index.tensors.values())) == 2 * done.largest_bytes
    assert max(reads) == done.largest_bytes
    assert sum(reads) == done.num_bytes
    assert len(sizes) == done.num_tensors
    assert max(sizes) == done.largest_bytes


def test_another_type_leaves_biases_wide_and_experts_of_two_types_are_refused(folders, tmp_path):
    wide = train.convert(folders["v3"], tmp_path / "wide", "checkpoint", dtype="float32")
    narrow = train.convert(wide.path, tmp_path / "narrow", "published", dtype="bfloat16")
    there, back = models.PretrainedFolder(folders["v3"]), models.PretrainedFolder(narrow.path)
    for name, stored in back.tensors.items():
        assert stored.dtype == (torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
        assert torch.equal(back.read(name).to(torch.bfloat16), there.read(name))
    expert = "model.layers.1.mlp.experts.5.up_proj.weight"
    mixed = with_tensors(narrow.path, tmp_path / "mixed", **{expert: lambda state: state[expert].float()})
    with pytest.raises(models.PretrainedError, match=r"experts\.5\.up_proj\.weight is torch.float32, .* give dtype="):
        train.convert(mixed, tmp_path / "target", "checkpoint")
    assert left(tmp_path) == ["mixed", "narrow", "wide"]
    train.convert(mixed, tmp_path / "target", "checkpoint", dtype="float32")
    models.save_pretrained(read(narrow.path, torch.bfloat16), tmp_path / "saved")
    assert same_folders(narrow.path, tmp_path / "saved")


PUBLISHED = {
    "a cut file": (lambda f: cut(next(f.glob("model-00002*"))), "model-00002.* is cut: model.* ends at byte"),
    "another shape": (
        lambda f: change(f / "config.json", lambda v: v.update(intermediate_size=44)),
        r"safetensors: model.layers.0.mlp.\w+.weight has shape \(40, 32\), the config asks for \(44, 32\)",
    ),
    "nothing": (shutil.rmtree, "holds no weights that can be converted: give a folder"),
}


@pytest.mark.parametrize("broken", PUBLISHED)
def test_a_published_folder_that_cannot_be_used_leaves_nothing(folders, broken, tmp_path):
    folder = shutil.copytree(folders["qwen3, tied"], tmp_path / "source")
    spoil, message = PUBLISHED[broken]
    spoil(folder)
    for to in ("checkpoint", "published"):
        with pytest.raises(models.PretrainedError, match=message):
            train.convert(folder, tmp_path / "target", to)
    assert left(tmp_path) in (["source"], [])


def test_two_tables_of_a_tied_config_are_compared(folders, tmp_path):
    heads = {
        "equal": torch.clone,
        "wider": torch.Tensor.double,
        "other": lambda table: table.add(torch.eye(*table.shape)),
    }
    heads["one row less"] = lambda table: table[:-1].clone()
    for kind, head in heads.items():
        changes = {"lm_head.weight": lambda state, head=head: head(state["model.embed_tokens.weight"])}
        folder = with_tensors(folders["qwen3, tied"], tmp_path / "source", **changes)
        model = models.PlainLlama(models.config_from_pretrained(folder))
        is_same = kind in ("equal", "wider")
        refused = pytest.raises(models.PretrainedError, match=r"lm_head\.weight has other values than model\.embed_tok")
        with nullcontext() if is_same else refused:
            models.load_pretrained(model, folder)
        with nullcontext() if is_same else refused:
            train.convert(folder, tmp_path / kind, "checkpoint")
        assert (tmp_path / kind).exists() == is_same


@pytest.mark.parametrize("to", ["published", "checkpoint"])
def test_a_weight_that_a_type_cannot_hold_is_refused_by_its_name(folders, to, tmp_path):
    for value, is_held in ((65_504.0, True), (torch.inf, True), (-65_536.0, False)):
        change = lambda state, value=value: state["model.norm.weight"].index_fill(0, torch.tensor(1), value)  # noqa: E731
        folder = with_tensors(folders["qwen3, tied"], tmp_path / "source", **{"model.norm.weight": change})
        words = r"model\.norm\.weight has 1 weights of up to 6\.554e\+04, and torch\.float16 ends at 6\.55e\+04"
        with nullcontext() if is_held else pytest.raises(models.PretrainedError, match=words):
            train.convert(folder, tmp_path / f"{value}", to, dtype="float16")
        assert (tmp_path / f"{value}").exists() == is_held
    half = models.PlainLlama(models.config_from_pretrained(folder), torch.float16)
    with pytest.raises(models.PretrainedError, match=r"norm\.weight has 1 weights"):
        models.load_pretrained(half, folder)
    assert all(parameter.isnan().all() for parameter in half.parameters())


def test_a_checkpoint_that_cannot_be_used_leaves_nothing(trained, tmp_path):
    """A flipped bit shows only when its tensor is read: then others are written already, and are removed."""
    folder = shutil.copytree(trained["dense, bf16 with masters"], tmp_path / "source")
    file = folder / "rank-00002.safetensors"
    content = bytearray(file.read_bytes())
    entry = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["parameter/norm.weight"]
    content[8 + int.from_bytes(content[:8], "little") + entry["data_offsets"][0]] ^= 1
    file.write_bytes(content)
    for to in ("published", "checkpoint"):
        message = r"rank-00002.safetensors: tensor parameter/norm.weight .*differ from their checksum"
        with pytest.raises(checkpoint.CheckpointError, match=message):
            train.convert(folder, tmp_path / "target", to)
        assert left(tmp_path) == ["source"]
    cut(file)
    with pytest.raises(checkpoint.CheckpointError, match=r"rank-00002.safetensors has \d+ bytes of"):
        train.convert(folder, tmp_path / "target", "published")


def test_a_checkpoint_that_says_another_model_is_refused(trained, tmp_path):
    for edit, message in (
        ({"num_layers": 1}, "has tensor parameter/layers.1.* which the model of its config has not"),
        ({"num_layers": 3}, "has no tensor parameter/layers.2.* which its config asks for"),
        ({"ffn_size": 25}, r"tensor parameter/layers.0.mlp.gate.weight has shape \(24, 16\), its config asks for"),
    ):
        model = {"model": "LlamaConfig", "config": vars(replace(LLAMA, **edit))}
        kept = checkpoint.Checkpoint(trained["dense, bf16 with masters"])
        kept.index.values["config"] = model
        (tmp_path / "source").mkdir(exist_ok=True)
        shutil.copytree(kept.path, tmp_path / "source", dirs_exist_ok=True)
        (tmp_path / "source" / "index.json").write_text(kept.index.dumps())
        with pytest.raises(checkpoint.CheckpointError, match=message):
            train.convert(tmp_path / "source", tmp_path / "target", "published")
        assert left(tmp_path) == ["source"]


def test_requests_that_cannot_be(folders, tmp_path):
    source = folders["llama 3.1"]
    for options, message in (
        ({"to": "onnx"}, "no form 'onnx' of weights; use one of published, checkpoint"),
        ({"to": "checkpoint", "dtype": "int8"}, "no type 'int8' of weights; use one of float64"),
        ({"to": "checkpoint", "max_bytes": 0}, "a file has at least 1 byte, got max_bytes=0"),
    ):
        with pytest.raises(ValueError, match=message):
            train.convert(source, tmp_path / "target", **options)
    assert left(tmp_path) == []
    train.convert(source, tmp_path / "target", "checkpoint")
    with pytest.raises(checkpoint.CheckpointError, match="step-00000000 is there already"):
        train.convert(source, tmp_path / "target", "checkpoint")
    with pytest.raises(models.PretrainedError, match="is there already, and nothing is overwritten"):
        train.convert(source, tmp_path / "target", "published")
    without = models.V3MoEConfig(num_layers=2)
    options = {"steps": 1, "sequence_length": 8, "global_batch": 2, "log_every": 0, "folder": tmp_path / "saved"}
    train.run(without, lab.Plan(), data.frozen_corpus(), **options)
    with pytest.raises(models.PretrainedError, match=r"step-00000001 has no published form: .* give it latent="):
        train.convert(tmp_path / "saved", tmp_path / "published", "published")
    assert left(tmp_path) == ["saved", "target"]
