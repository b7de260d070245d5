"""What each rank reads of a published folder is known before any rank runs; a training begins with one."""

import json
import time
from collections import Counter
from math import prod

import pytest
import torch
import transformers
from published import DEEPSEEK, QWEN3_MOE, change, written

import dualpipe_lab as lab
from dualpipe_lab import data, models, schedules, train
from dualpipe_lab.dp.checkpoint.file import read_header
from dualpipe_lab.models.parameters import full_parameters
from dualpipe_lab.models.pretrained import folder as folder_module
from dualpipe_lab.models.pretrained.load import tensors_of

DENSE = {"llama": {}, "qwen3, tied": {"family": "Qwen3", "head_dim": 8, "tie_word_embeddings": True}}
ROUTED = {
    "v3": DEEPSEEK | {"num_hidden_layers": 4},
    "v3, queries without a latent": DEEPSEEK
    | {"num_hidden_layers": 4, "q_lora_rank": None, "n_shared_experts": 2, "moe_intermediate_size": 13},
    "qwen3-moe": QWEN3_MOE | {"num_hidden_layers": 4, "num_key_value_heads": 2, "mlp_only_layers": [0]},
}
CUTS = {  # of 4 ranks: axes, schedule, more of the topology
    "more ranks than KV heads": ({"tp": 4}, None, {}),
    "dp 2 x tp 2": ({"dp": 2, "tp": 2}, None, {}),
    "dp 2 x cp 2": ({"dp": 2, "cp": 2}, None, {}),
    "1F1B": ({"pp": 2, "tp": 2}, ("1f1b", 2, 4), {}),
    "DualPipe": ({"pp": 2, "tp": 2}, ("dualpipe", 2, 4), {}),
    "DualPipeV": ({"pp": 2, "dp": 2}, ("dualpipev", 2, 4), {}),
    "ep 4": ({"ep": 4}, None, {}),
    "tp 2 x ep 2": ({"tp": 2, "ep": 2}, None, {}),
    "experts within dp": ({"dp": 4}, None, {"edp": 2}),
    "experts within dp x cp": ({"dp": 2, "cp": 2}, None, {"edp": 1, "experts_over": ("dp", "cp")}),
    "DualPipe, ep 2": ({"pp": 2, "ep": 2}, ("dualpipe", 2, 4), {}),
    "ZBV, experts within dp": ({"pp": 2, "dp": 2}, ("zbv", 2, 4), {"edp": 1}),
}


def cases():
    """Every cut and kind that fit: without experts nothing is shared along ep."""
    for cut, (axes, schedule, more) in CUTS.items():
        topology = lab.Topology(list(axes.items()), **more)
        program = None if schedule is None else schedules.build(*schedule)
        for kind in (*DENSE, *ROUTED) if topology.size("ep") == 1 else ROUTED:
            yield cut, kind, topology, program


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return written(DENSE | ROUTED, tmp_path_factory, "20KB")


def reads_on_ranks(rank, world_size, folders, chosen):
    """File, tensor, places and bytes of every read of a load, by cut and kind."""
    found, read = {}, folder_module._read
    for cut, kind, topology, program in chosen:
        mesh, path = lab.Mesh(topology), folders[kind]
        config = models.config_from_pretrained(path)
        layout = lab.cp.make_layout("zigzag", 16, mesh.size("cp")) if mesh.size("cp") > 1 else None
        model = models.build_stages(config, mesh, program, dtype=torch.float64, layout=layout)
        shapes = {
            name: extent.shape
            for file in path.glob("*.safetensors")
            for name, extent in read_header(file).tensors.items()
        }
        reads = found[cut, kind] = []

        def noted(file, name, where, shapes=shapes, reads=reads):
            tensor, shape = read(file, name, where), shapes[name]
            where = (*where, *[slice(None)] * (len(shape) - len(where)))
            places = [each.indices(size)[:2] for each, size in zip(where, shape, strict=True)]
            reads.append((file.name, name, tuple(places), tensor.nbytes))
            return tensor

        folder_module._read = noted
        models.load_pretrained(model, path)
        folder_module._read = read
    return found


def test_the_slices_of_a_plan_are_those_that_its_ranks_read_in_their_order(folders, some):
    chosen = some(list(cases()), 18)
    results = lab.launch(reads_on_ranks, 4, folders, chosen, timeout=240)
    for cut, kind, topology, program in chosen:
        planned = models.slices_of(folders[kind], topology, program)
        for rank, found in enumerate(results):
            assert list(map(tuple, planned[rank])) == found[cut, kind], (cut, kind, rank)
        if topology.size("ep") > 1:  # ranks of one stage and tp read other experts
            names = [{one.tensor for one in rank if ".experts." in one.tensor} for rank in planned]
            assert len(set(map(frozenset, names))) >= topology.size("ep")


def test_slices_are_planned_from_headers_alone(folders, tmp_path, monkeypatch):
    def read(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(folder_module, "_read", read)
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


def write_headers(folder, values, num_files):
    """A published folder whose files have their full length and no bytes on disk; returns the shapes of its tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    config = models.config_from_pretrained(folder)
    shapes = {name: each.file_shape for each in full_parameters(config).values() for name in each.file_names}
    names, places = list(shapes), {}
    for number in range(num_files):
        file, header, end = f"model-{number + 1:05}.safetensors", {}, 0
        for name in names[number::num_files]:
            begin, end, places[name] = end, end + 2 * prod(shapes[name]), file
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [begin, end]}
        encoded = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(encoded).to_bytes(8, "little") + encoded)
            out.truncate(8 + len(encoded) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return shapes


def test_deepseek_v3_is_sliced_from_headers_in_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "_read", None)
    values = transformers.DeepseekV3Config().to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    values["rope_parameters"] = {
        "rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "rope_theta": 10000,
    }  # fmt: skip
    shapes = write_headers(tmp_path / "v3", values, 163)
    begin = time.process_time()  # other processes may run beside it
    (alone,) = models.slices_of(tmp_path / "v3", lab.Topology([("tp", 1)]))
    assert {one.tensor: tuple(stop for _, stop in one.where) for one in alone} == shapes
    ranks = models.slices_of(
        tmp_path / "v3", lab.Topology([("pp", 16), ("ep", 64)]), schedules.build("dualpipe", 16, 32)
    )
    assert time.process_time() - begin < 60
    assert len(ranks) == 1024
    times = Counter(one.tensor for rank in ranks for one in rank if ".experts." in one.tensor)
    routed = [name for name in shapes if ".experts." in name]
    assert times == dict.fromkeys(routed, 2)  # DualPipe has two copies of every stage
    most = max(sum(one.num_bytes for one in rank) for rank in ranks)
    assert most < sum(one.num_bytes for one in alone) / 64


SIZES = {"hidden_size": 16, "ffn_size": 24, "num_heads": 2}
SMALL = models.LlamaConfig(**SIZES, num_layers=2, num_kv_heads=1)
SMALL_V3 = models.V3MoEConfig(
    **SIZES, expert_ffn_size=12, num_layers=4, latent=lab.tp.LatentSizes(12, 10, 6, 4, 5), balance=0.0
)
OPTIONS = {"sequence_length": 16, "global_batch": 8, "log_every": 0, "steps": 2, "seed": 3}
STARTED = [  # a model, and plans that train it as one rank does
    (models.PlainLlama(SMALL, torch.float64), [{"pp": 2, "dp": 2, "zero": 1}]),
    (
        models.PlainV3MoE(SMALL_V3, torch.float64),
        [
            {"pp": 2, "ep": 2, "schedule": "dualpipe", "overlap": True, "zero": 2},
            {"dp": 2, "cp": 2, "ep": 2, "experts_in_data": True, "zero": 3},
        ],
    ),
]


@pytest.mark.parametrize(("model", "plans"), STARTED, ids=["llama", "v3"])
def test_a_training_begins_with_a_published_folder_under_any_plan(model, plans, tmp_path):
    """Biases of routers take part from the first step on; without them other experts are chosen."""
    generator = torch.Generator().manual_seed(7)
    for name, tensor in tensors_of(model):
        tensor.data.normal_(std=0.3, generator=generator).add_(name.endswith("norm.weight"))
    models.save_pretrained(model, tmp_path / "published")
    config, text = models.config_from_pretrained(tmp_path / "published"), data.frozen_corpus()
    batch = train.TrainOptions(seed=3, sequence_length=16, global_batch=8).sampler(text).batch(0, 1, 0, 1, None, 0)
    with torch.no_grad():
        first = float(model.loss(batch.inputs[0], batch.targets[0]))
    curves = []
    for fields in ({}, *plans):
        plan = lab.Plan(num_microbatches=4 // fields.get("dp", 1), precision="float64", **fields)
        curves.append(train.run(config, plan, text, start=str(tmp_path / "published"), **OPTIONS).losses)
    for losses in curves:
        assert losses == pytest.approx(curves[0], rel=1e-10)
    assert curves[0][0] == pytest.approx(first, rel=1e-10)


def test_a_training_that_cannot_begin_is_refused_before_any_process(tmp_path, monkeypatch):
    monkeypatch.setitem(train.run.__globals__, "_launched", None)
    models.save_pretrained(models.PlainLlama(SMALL), tmp_path / "published")
    converted = train.convert(tmp_path / "published", tmp_path / "ours", "checkpoint").path
    plan, text = lab.Plan(), data.frozen_corpus()
    for config, options, message in (
        (models.LlamaConfig(), {"start": tmp_path / "published"}, "published is of .* build it from config_from"),
        (SMALL_V3, {"start": tmp_path / "published"}, "published is of LlamaConfig.* the model of V3MoEConfig"),
        (models.V3MoEConfig(), {"start": tmp_path / "published"}, "published weights are those of .* give it latent="),
        (SMALL, {"start": tmp_path / "none"}, "none/config.json cannot be read"),
        (SMALL, {"start": "a", "resume": converted}, "begins with start=a or goes on from resume=.*, got both"),
        (SMALL, {"resume": converted}, "has converted weights and no state of a training; begin with the published"),
    ):
        with pytest.raises(ValueError, match=message):
            train.run(config, plan, text, **OPTIONS, **options)
    change(tmp_path / "published" / "config.json", lambda values: values.update(architectures=["GPT2LMHeadModel"]))
    with pytest.raises(models.PretrainedError, match=r"one architecture of .*GPT2LMHeadModel"):
        train.run(SMALL, plan, text, start=tmp_path / "published", **OPTIONS)
