"""The slices of DeepSeek-V3 and Qwen3-MoE in their own sizes, from files that have headers and no bytes."""

import json
import math
import time
from collections import Counter

import safetensors.torch
import torch
import transformers
from published import DEEPSEEK, reference
from test_pretrained_configs import QWEN3_30B_A3B

import dualpipe_lab as lab
from dualpipe_lab import models, schedules
from dualpipe_lab.dp.checkpoint.file import read_header
from dualpipe_lab.models.pretrained import folder as folders
from dualpipe_lab.models.pretrained.load import full_shapes, is_stacked, published_names

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "rope_theta": 10000}


def tensors_in_files(config, is_fp8):
    """Type and shape of every tensor as they are published, by name."""
    found = {}
    for ours, full in full_shapes(config).items():
        shape = full[1:] if is_stacked(ours) else full
        for name in published_names(ours, config):
            if ours.endswith("router.bias"):
                found[name] = "F32", shape
            elif (
                is_fp8
                and len(shape) == 2
                and not name.startswith(("lm_head", "model.embed"))
                and "mlp.gate." not in name
            ):
                found[name] = "F8_E4M3", shape
                found[f"{name}_scale_inv"] = "F32", tuple(-(-size // 128) for size in shape)
            else:
                found[name] = "BF16", shape
    return found


def write_headers(folder, values, num_files, is_fp8=False):
    """A published folder whose files have their full length and no bytes on disk; returns its tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    tensors = tensors_in_files(models.config_from_pretrained(folder), is_fp8)
    names, places = list(tensors), {}
    size = -(-len(names) // num_files)
    for number in range(num_files):
        file, header, end = f"model-{number + 1:05}-of-{num_files:06}.safetensors", {}, 0
        for name in names[number * size : (number + 1) * size]:
            kind, shape = tensors[name]
            begin, end = end, end + math.prod(shape) * {"BF16": 2, "F32": 4, "F8_E4M3": 1}[kind]
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
            places[name] = file
        encoded = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(encoded).to_bytes(8, "little") + encoded)
            out.truncate(8 + len(encoded) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tensors


def numel(one):
    return math.prod(stop - start for start, stop in one.where)


def weights_of(rank):
    return [one for one in rank if not one.tensor.endswith("_scale_inv")]


def test_deepseek_v3_is_sliced_from_headers_in_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.PretrainedFolder, "read", None)
    values = transformers.DeepseekV3Config().to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    values |= {"rope_parameters": YARN, "quantization_config": FP8}
    tensors = write_headers(tmp_path / "v3", values, 163, is_fp8=True)
    assert sum(file.stat().st_size for file in (tmp_path / "v3").glob("*.safetensors")) > 650e9
    begin = time.process_time()  # other processes may run beside it
    (alone,) = models.slices_of(tmp_path / "v3", lab.Topology([("tp", 1)]))
    assert {one.tensor: tuple(stop for _, stop in one.where) for one in alone} == {
        n: s for n, (_, s) in tensors.items()
    }
    assert round(sum(numel(one) for one in weights_of(alone) if "bias" not in one.tensor) / 1e9, 2) == 671.03

    topology = lab.Topology([("pp", 16), ("ep", 64)])
    ranks = models.slices_of(tmp_path / "v3", topology, schedules.build("dualpipe", 16, 32))
    assert time.process_time() - begin < 60
    assert len(ranks) == 1024
    times = Counter()
    for rank in ranks:
        experts = [one for one in weights_of(rank) if ".experts." in one.tensor]
        layers = {one.tensor.split(".")[2] for one in experts}
        assert len(experts) == len(layers) * 3 * 256 // 64
        times.update(one.tensor for one in experts)
    routed = [name for name in tensors if ".experts." in name and not name.endswith("_scale_inv")]
    assert times == dict.fromkeys(routed, 2)  # DualPipe has two copies of every stage
    most = max(sum(one.num_bytes for one in rank) for rank in ranks)
    assert most < sum(one.num_bytes for one in alone) / 64


def test_qwen3_moe_is_sliced_from_headers(tmp_path):
    values = transformers.Qwen3MoeConfig(**QWEN3_30B_A3B).to_dict()
    write_headers(tmp_path / "qwen", values, 16)
    topology = lab.Topology([("dp", 2), ("tp", 8)], edp=1)
    ranks = models.slices_of(tmp_path / "qwen", topology)
    keys = [next(one for one in rank if one.tensor.endswith("0.self_attn.k_proj.weight")) for rank in ranks]
    assert [one.where[0] for one in keys[:8]] == [(128 * (t // 2), 128 * (t // 2 + 1)) for t in range(8)]
    held = [{one.tensor for one in rank if ".experts." in one.tensor} for rank in ranks]
    assert [len(names) for names in held] == [48 * 64 * 3] * 16
    assert held[0] == held[7]
    assert not held[0] & held[8]


def test_scales_are_read_with_the_slices_that_they_belong_to(tmp_path, monkeypatch):
    """In blocks of 3 x 5, which no slice of a rank meets."""
    folder, read, reads = tmp_path / "fp8", folders._read, []
    reference(**DEEPSEEK, dtype=torch.float32).save_pretrained(folder)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    for name in [
        name for name, weight in state.items() if weight.dim() == 2 and ("self_attn" in name or "_proj" in name)
    ]:
        rows, columns = state[name].shape
        state[name] = state[name].to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = torch.rand(-(-rows // 3), -(-columns // 5)) + 0.5
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(values | {"quantization_config": FP8 | {"weight_block_size": [3, 5]}})
    )
    topology = lab.Topology([("tp", 2), ("ep", 2)])

    def fn(rank, world_size):
        shapes = {name: extent.shape for name, extent in read_header(folder / "model.safetensors").tensors.items()}

        def noted(file, name, where):
            tensor = read(file, name, where)
            places = (*where, *[slice(None)] * (len(shapes[name]) - len(where)))
            ends = [part.indices(size)[:2] for part, size in zip(places, shapes[name], strict=True)]
            reads.append((file.name, name, tuple(ends), tensor.nbytes))
            return tensor

        model = models.build_stages(models.config_from_pretrained(folder), lab.Mesh(topology))
        folders._read = noted
        models.load_pretrained(model, folder)
        folders._read = read
        return reads

    planned = models.slices_of(folder, topology)
    for rank, found in enumerate(lab.launch(fn, 4)):
        assert list(map(tuple, planned[rank])) == found
    scales = [one for rank in planned for one in rank if one.tensor.endswith("_scale_inv")]
    assert any(one.where[0][0] for one in scales)  # of slices that do not begin at the first block
