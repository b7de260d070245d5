"""The whole Llama over parts of a sequence, alone and together with tensor and data parallelism, beside plain torch."""

import pytest
import torch
from cp_runs import assert_close
from runs import launch

import dualpipe_lab as lab
from dualpipe_lab.cp.layouts import LAYOUTS, make_layout
from dualpipe_lab.cp.sequence import next_token_labels, shard_sequence
from dualpipe_lab.dp.data_parallel import all_reduce_gradients, num_valid_tokens
from dualpipe_lab.models.llama import Llama
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.plain_llama import PlainLlama
from dualpipe_lab.models.stage import check_topology
from dualpipe_lab.sharding import shard_slice
from dualpipe_lab.tp.shard import full_state_dict

CONFIG = LlamaConfig(vocabulary_size=37, hidden_size=24, ffn_size=30, num_layers=2, num_heads=4, num_kv_heads=2)
ROWS, LENGTH = 4, 24


def batch():
    """Tokens, and labels of which one rank of a contiguous cut has hardly any."""
    ids = torch.randint(0, 37, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = next_token_labels(ids)
    labels[:, :7] = -100
    return ids, labels


def plain(state, ids, labels):
    """Loss and gradients on one process, of the same weights."""
    model = PlainLlama(CONFIG, torch.float64)
    model.load_state_dict(state)
    loss = model.loss(ids, labels)
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "axes",
    [[("cp", 3)], [("cp", 2), ("tp", 2)], [("dp", 2), ("cp", 2)]],
    ids=lambda axes: " ".join(f"{name}{size}" for name, size in axes),
)
def test_loss_and_gradients_are_those_of_plain_torch(axes):
    topology = lab.Topology(axes)

    def fn(rank, world_size):
        mesh, found = lab.Mesh(topology), []
        rows = shard_slice(ROWS, mesh.size("dp"), mesh.rank("dp"))
        for name in LAYOUTS:
            for is_sequence_parallel in (False, True) if mesh.size("tp") > 1 else (False,):
                layout = make_layout(name, LENGTH, mesh.size("cp"))
                model = Llama(CONFIG, mesh, is_sequence_parallel, dtype=torch.float64, layout=layout)
                expected = plain(full_state_dict(model, model.tp.group), *batch())
                ids, labels = (shard_sequence(tensor[rows], layout, mesh.rank("cp")) for tensor in batch())
                group = mesh.group("dp", "cp")
                loss = model.loss(ids, labels, num_tokens=num_valid_tokens(labels, group))
                loss.backward()
                all_reduce_gradients(model.parameters(), group)
                lab.comm.all_reduce(total := loss.detach().clone(), group=group)
                ours = {"loss": total} | full_state_dict(model, model.tp.group, "grad")
                found.append((ours, expected, (name, is_sequence_parallel)))
        return found

    for found in launch(fn, topology.world_size):
        for ours, expected, case in found:
            assert ours.keys() == expected.keys()
            for name, value in expected.items():
                assert_close(ours[name], value, case=(case, name))


@pytest.mark.parametrize(
    ("axes", "layout", "message"),
    [
        ([("cp", 2)], None, r"along cp 2, got layout=None; make_layout\(name, length, num_ranks=2\)"),
        ([("cp", 2)], ("zigzag", 24, 3), "along cp 2, got layout=<zigzag layout of 24 positions on 3 ranks>"),
        ([("tp", 2)], ("striped", 24, 2), "along cp 1, got layout=<striped"),
    ],
)
def test_a_layout_that_is_missing_or_of_another_ring_is_named_before_any_process_starts(axes, layout, message):
    with pytest.raises(ValueError, match=message):
        check_topology(CONFIG, lab.Topology(axes), layout and make_layout(*layout))
