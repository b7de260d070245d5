"""The same Llama cut by torch: the same loss, and gradients."""

import pytest
import torch
from runs import assert_a1, distances, launch
from torch.distributed.tensor import DTensor

import dualpipe_lab as lab
from dualpipe_lab.models.llama import Llama
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.plain_llama import PlainLlama, parallelize
from dualpipe_lab.tp.shard import full_state_dict

CONFIG = LlamaConfig(vocabulary_size=37, hidden_size=24, ffn_size=32, num_layers=2, num_heads=4, num_kv_heads=2)


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.on_gloo("the stand-in's mark lies on storages, and torch's DTensor has none of its own")
def test_torch_s_plan_gives_our_numbers():
    """Colwise, Rowwise, SequenceParallel and loss_parallel on 2 ranks; some targets are ignored."""
    ids = torch.arange(24).view(2, 12) * 5 % 37
    targets = (ids + 1) % 37
    targets[0, :3] = -100

    def fn(rank, world_size):
        mesh, found = lab.Mesh(lab.Topology([("tp", 2)])), {}
        for sequence_parallel in (False, True):
            model = Llama(CONFIG, mesh, sequence_parallel, dtype=torch.float64)
            theirs = PlainLlama(CONFIG, torch.float64)
            theirs.load_state_dict(full_state_dict(model, model.tp.group))
            theirs = parallelize(theirs, mesh.device_mesh(), sequence_parallel)
            loss = model.loss(ids, targets)
            loss.backward()
            with torch.distributed.tensor.parallel.loss_parallel():
                other = theirs.loss(ids, targets)
                other.backward()
            expected = {name: whole(value.grad) for name, value in theirs.named_parameters()}
            expected["loss"] = whole(other.detach())
            found[sequence_parallel] = distances(
                {"loss": loss.detach()} | full_state_dict(model, model.tp.group, "grad"), expected
            )
        return found

    assert_a1(launch(fn, 2))
