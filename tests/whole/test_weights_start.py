"""What each rank reads of a published folder is known before any rank runs; a training begins with one."""

import json
from math import prod

import pytest
import torch
from published import reference

import dualpipe_lab as lab
from dualpipe_lab import data, models, schedules, train
from dualpipe_lab.models.pretrained.folder import PretrainedFolder

KINDS = {"llama": {}, "qwen3, tied": {"family": "Qwen3", "head_dim": 8, "tie_word_embeddings": True}}
CUTS = {  # of 4 ranks
    "more ranks than key heads": ({"tp": 4}, None),
    "dp 2 x tp 2": ({"dp": 2, "tp": 2}, None),
    "1F1B": ({"pp": 2, "tp": 2}, ("1f1b", 2, 4)),
    "DualPipe": ({"pp": 2, "tp": 2}, ("dualpipe", 2, 4)),
    "DualPipeV": ({"pp": 2, "dp": 2}, ("dualpipev", 2, 4)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for kind, options in KINDS.items():
        found[kind] = tmp_path_factory.mktemp("published") / "model"
        reference(**options).save_pretrained(found[kind], max_shard_size="20KB")
    return found


def reads_on_ranks(rank, world_size, folders):
    """File, tensor, places and bytes of every read of a load, by cut and kind."""
    found, read = {}, PretrainedFolder.read
    for cut, (axes, schedule) in CUTS.items():
        mesh = lab.Mesh(lab.Topology(list(axes.items())))
        program = None if schedule is None else schedules.build(*schedule)
        for kind, path in folders.items():
            model = models.build_stages(models.config_from_pretrained(path), mesh, program, dtype=torch.float64)
            reads = found[cut, kind] = []

            def noted(folder, name, where=(), reads=reads):
                tensor, stored = read(folder, name, where), folder.find(name)
                where = where or [slice(None)] * len(stored.shape)
                places = [each.indices(size)[:2] for each, size in zip(where, stored.shape, strict=True)]
                reads.append((stored.file.name, name, tuple(places), tensor.nbytes))
                return tensor

            PretrainedFolder.read = noted
            models.load_pretrained(model, path)
            PretrainedFolder.read = read
    return found


def test_the_slices_of_a_plan_are_those_that_its_ranks_read(folders):
    results = lab.launch(reads_on_ranks, 4, folders)
    for cut, (axes, schedule) in CUTS.items():
        program = None if schedule is None else schedules.build(*schedule)
        for kind, path in folders.items():
            planned = models.slices_of(path, lab.Topology(list(axes.items())), program)
            for rank, found in enumerate(results):
                assert sorted(map(tuple, planned[rank])) == sorted(found[cut, kind]), (cut, kind, rank)


def test_slices_are_planned_from_headers_alone(folders, tmp_path, monkeypatch):
    def read(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(PretrainedFolder, "read", read)
    path = folders["llama"]
    ((*_, last),) = models.slices_of(path, lab.Topology([("tp", 1)]))
    assert last.tensor == "lm_head.weight"
    assert str(last) == f"{last.file}: lm_head.weight[0:48, 0:32], {48 * 32 * 8:,} bytes"
    ranks = models.slices_of(path, lab.Topology([("tp", 2)]))
    norms = {each.tensor for each in ranks[0] if "norm" in each.tensor}
    halves = [sum(each.num_bytes for each in rank if each.tensor not in norms) for rank in ranks]
    stored = models.PretrainedFolder(path).tensors.items()
    assert halves[0] == halves[1] == sum(prod(s.shape) * 8 for name, s in stored if name not in norms) // 2
    with pytest.raises(ValueError, match="num_heads must divide among the ranks, got 4 on 3 ranks"):
        models.slices_of(path, lab.Topology([("tp", 3)]))
    with pytest.raises(models.PretrainedError, match=r"config.json cannot be read"):
        models.slices_of(tmp_path, lab.Topology([("tp", 2)]))


SMALL = models.LlamaConfig(hidden_size=16, ffn_size=24, num_layers=2, num_heads=2, num_kv_heads=1)
OPTIONS = {"sequence_length": 16, "global_batch": 4, "log_every": 0, "steps": 2}


def test_a_training_begins_with_a_published_folder_under_any_plan(tmp_path):
    torch.manual_seed(7)
    model = models.PlainLlama(SMALL, torch.float64)
    models.save_pretrained(model, tmp_path / "published")
    config, text = models.config_from_pretrained(tmp_path / "published"), data.frozen_corpus()
    curves = [
        train.run(config, lab.Plan(precision="float64", **plan), text, seed=3, start=start, **OPTIONS).losses
        for plan, start in (
            ({}, tmp_path / "published"),
            ({"pp": 2, "dp": 2, "num_microbatches": 2, "zero": 1}, str(tmp_path / "published")),
            ({}, None),
        )
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-10)
    assert abs(curves[0][0] - curves[2][0]) > 1e-4
    sampler = train.Options(seed=3, sequence_length=16, global_batch=4).sampler(text)
    batch = sampler.batch(0, 1, 0, 1, None, 0)
    with torch.no_grad():
        assert curves[0][0] == pytest.approx(float(model.loss(batch.inputs[0], batch.targets[0])), rel=1e-10)


def test_a_training_that_cannot_begin_is_refused_before_any_process(tmp_path, monkeypatch):
    monkeypatch.setitem(train.run.__globals__, "_launched", None)
    models.save_pretrained(models.PlainLlama(SMALL), tmp_path / "published")
    converted = train.convert(tmp_path / "published", tmp_path / "ours", "checkpoint").path
    plan, text = lab.Plan(), data.frozen_corpus()
    for config, options, message in (
        (models.LlamaConfig(), {"start": tmp_path / "published"}, "published is of .* build it from config_from"),
        (models.V3MoEConfig(), {"start": tmp_path / "published"}, "with a published Llama or Qwen3, got a V3MoEConfig"),
        (SMALL, {"start": tmp_path / "none"}, "none/config.json cannot be read"),
        (SMALL, {"start": "a", "resume": converted}, "begins with start=a or goes on from resume=.*, got both"),
        (SMALL, {"resume": converted}, "has converted weights and no state of a training; begin with the published"),
    ):
        with pytest.raises(ValueError, match=message):
            train.run(config, plan, text, **OPTIONS, **options)
    file = tmp_path / "published" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(models.PretrainedError, match="is of GPT2LMHeadModel"):
        train.run(SMALL, plan, text, start=tmp_path / "published", **OPTIONS)
