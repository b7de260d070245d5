"""Tensor parallelism under ZeRO, on 2 x 2 ranks: norms, clipping and weights of one process."""

from itertools import product

import pytest
import torch
from llama_runs import SIZES
from runs import distance, launch

import dualpipe_lab as lab
from dualpipe_lab.dp.adam import AdamW
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.models.llama import Llama
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.plain_llama import PlainLlama
from dualpipe_lab.sharding import shard_slice
from dualpipe_lab.tp.grads import sum_partial_gradients
from dualpipe_lab.tp.shard import full_state_dict

STAGES = DDP, Zero1, Zero2, Zero3
TOPOLOGY = lab.Topology([("dp", 2), ("tp", 2)])
# eps is large: else Adam would hide a gradient that is clipped too much
HYPER, MAX_NORM, STEPS = {"lr": 0.01, "eps": 0.1, "weight_decay": 0.1}, 0.5, 2
MODELS = {  # KV heads: 1 is on both ranks of tp, 2 are dealt out
    "copies": LlamaConfig(**SIZES, num_heads=4, num_kv_heads=1, qk_norm=True),
    "tied": LlamaConfig(**SIZES, num_heads=4, num_kv_heads=2, tied=True),
}


def batches():
    """In each step three sequences for two ranks of dp, of which one has two; some targets are ignored."""
    found = []
    for seed in range(STEPS):
        ids, targets = torch.randint(0, 37, (2, 3, 12), generator=torch.Generator().manual_seed(seed))
        targets[0, :5] = -100
        found.append((ids, targets))
    return found


def one_process(config, state):
    """Norms and weights after training on the whole batch, by torch's clipping."""
    model = PlainLlama(config, torch.float64)
    model.load_state_dict(state | {"head.weight": state["embedding.weight"]} if config.tied else state)
    optimizer, norms = AdamW(model.parameters(), **HYPER), []
    for ids, targets in batches():
        optimizer.zero_grad()
        model.loss(ids, targets).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def build(stage, model):
    units = {"units": list(model.layers)} if stage is Zero3 else {}
    return stage(model, model.mesh, **units, **HYPER, reduce="sum")


def train(optimizer, mesh):
    model, norms = optimizer.module, []
    for ids, targets in batches():
        rows = shard_slice(len(ids), mesh.size("dp"), mesh.rank("dp"))
        optimizer.zero_grad()
        model.loss(ids[rows], targets[rows], num_tokens=int((targets != -100).sum())).backward()
        norms.append(optimizer.step(max_norm=MAX_NORM).norm)
    return norms


def trained(stage, config, mesh, sequence_parallel, coalesce=False):
    """Norms and those of one process, how far the weights are apart, and the all-reduces of the training."""
    model = Llama(config, mesh, sequence_parallel, coalesce=coalesce, dtype=torch.float64)
    expected_norms, expected = one_process(config, full_state_dict(model, model.tp.group))
    optimizer, before = build(stage, model), all_reduces()
    norms = train(optimizer, mesh)
    calls = all_reduces() - before
    with optimizer.gathered():
        weights = full_state_dict(model, model.tp.group)
    assert min(expected_norms) > 2 * MAX_NORM  # it does clip
    assert expected.keys() - weights.keys() <= {"head.weight"}  # tied: known as the embedding's
    return norms, expected_norms, max(distance(weights[key], expected[key]) for key in weights), calls


def check(case, norms, expected, off):
    assert norms == pytest.approx(expected, rel=1e-12), case
    assert off < 1e-12, case


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_weights_are_those_of_one_process(name, amount):
    """Every stage, with the whole sequence on each rank of tp and with parts of it."""
    cases = {*list(product(STAGES, (False, True)))[:: amount(1, 3)], (Zero2, False)}

    def fn(rank, world_size):
        mesh = lab.Mesh(TOPOLOGY)
        return {(stage.__name__, cut): trained(stage, MODELS[name], mesh, cut) for stage, cut in cases}

    for found in launch(fn, 4, timeout=400):
        assert len(found) == len(cases)
        for case, (*results, _) in found.items():
            check(case, *results)


@pytest.mark.parametrize(("sizes", "kv_heads"), [((2, 2), 1), ((1, 4), 2)], ids=str)
def test_on_a_mesh_gradients_left_partial_are_those_of_one_process(sizes, kv_heads, amount):
    """Norms of token shards over all ranks of tp, KV heads over their copies: one message per step for each."""
    config = LlamaConfig(**SIZES, num_heads=4, num_kv_heads=kv_heads, qk_norm=True)
    stages = (Zero3, Zero1, DDP, Zero2)[: amount(4, 2)]

    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology(list(zip(("dp", "tp"), sizes, strict=True))))
        return {s.__name__: [trained(s, config, mesh, True, coalesce) for coalesce in (False, True)] for s in stages}

    num_layers, num_messages = SIZES["num_layers"], 1 if kv_heads == 1 else 2
    per_backward = num_layers * (2 + 2 + 2) + 1  # norms of a layer, of heads, copies of k and v; the last norm
    saved = STEPS * (per_backward - num_messages)
    for found in launch(fn, 4, timeout=400):
        assert len(found) == len(stages)
        for case, ((*_, calls), (*results, fewer)) in found.items():
            check(case, *results)
            assert case == "DDP" or calls - fewer == saved, case  # its buckets are all-reduced, and are others


def all_reduces():
    entries = lab.rank_context().recorder.flush().ledger.entries
    return entries["all_reduce"].count if "all_reduce" in entries else 0


def test_a_call_that_sums_partial_gradients_leaves_those_of_a_mesh_alone():
    def fn(rank, world_size):
        model = Llama(MODELS["copies"], lab.Topology([("tp", 2)]), True, coalesce=True, dtype=torch.float64)
        optimizer, (ids, targets) = DDP(model, model.mesh, **HYPER), batches()[0]
        model.loss(ids, targets).backward()
        before = all_reduces()
        sum_partial_gradients(model)
        assert all_reduces() == before
        once = optimizer.grad_norm()
        sum_partial_gradients(model)
        return once == optimizer.grad_norm()

    assert launch(fn, 2) == [True, True]


def test_over_a_group_gradients_that_stay_partial_are_refused():
    def fn(rank, world_size):
        model = Llama(MODELS["copies"], lab.Topology([("tp", 2)]), coalesce=True)
        Zero1(model, model.mesh.group("dp"))

    with pytest.raises(lab.RankError, match=r"partial over ranks \[0, 1\], and tp of dp 1 = 1 ranks has"):
        launch(fn, 2)
