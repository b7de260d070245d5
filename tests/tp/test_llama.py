"""The whole Llama on any cut: gradients of plain torch, equal starts, bytes per layer, refusals."""

import pytest
import torch
from llama_runs import BATCH, SIZES, TOKENS, batch, plain
from runs import assert_a1, assert_refused, counted, distances, launch
from tp_runs import modes

import dualpipe_lab as lab
from dualpipe_lab.models.llama import Llama
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.plain_llama import PlainLlama
from dualpipe_lab.models.stage import check_topology
from dualpipe_lab.tp.closed_forms import cross_entropy_bytes, kv_bytes, layer_bytes, norm_bytes, sum_bytes
from dualpipe_lab.tp.grads import sum_partial_gradients
from dualpipe_lab.tp.shard import full_state_dict, load_full_state_dict

CONFIGS = {
    1: [LlamaConfig(**SIZES, num_heads=4, num_kv_heads=2)],
    3: [LlamaConfig(**SIZES, num_heads=6, num_kv_heads=3, qk_norm=True, tied=True)],
    4: [LlamaConfig(**SIZES | {"vocabulary_size": 9}, num_heads=4, num_kv_heads=1, head_size=2)],
}


@pytest.mark.parametrize("world_size", CONFIGS)
def test_loss_and_gradients_are_those_of_plain_torch(world_size):
    """Vocabularies of 37, and of 9, which leaves the last of 4 ranks nothing; few KV heads; tied tables."""

    def fn(rank, world_size):
        found, topology = {}, lab.Mesh(lab.Topology([("tp", world_size)]))
        for number, config in enumerate(CONFIGS[world_size]):
            ids, targets = batch(config.vocabulary_size)
            expected = None
            for name, tp in modes().items():
                for coalesce in (False, True) if name.startswith("sequence") else (False,):
                    options = {"regather": tp.regather, "overlap": tp.overlap, "coalesce": coalesce}
                    model = Llama(config, topology, tp.sequence_parallel, **options, dtype=torch.float64)
                    expected = expected or plain(config, full_state_dict(model, model.tp.group), ids, targets)
                    loss = model.loss(ids, targets)
                    loss.backward()
                    sum_partial_gradients(model)
                    results = {"loss": loss.detach()} | full_state_dict(model, model.tp.group, "grad")
                    found[number, name, coalesce] = distances(results, expected)
        return found

    assert_a1(launch(fn, world_size))


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_are_those_of_the_closed_forms(world_size):
    """Of a whole step, per operation: layers, embedding, head and loss; everything divides here."""
    sizes = {"vocabulary_size": 40, "hidden_size": 16, "ffn_size": 24, "num_heads": 4, "num_kv_heads": 2}
    config = LlamaConfig(**sizes, num_layers=3)
    tokens, width = BATCH * TOKENS, 8

    def fn(rank, world_size):
        found = {}
        for name, tp in modes().items():
            options = {"regather": tp.regather, "overlap": tp.overlap}
            model = Llama(
                config, lab.Topology([("tp", world_size)]), tp.sequence_parallel, **options, dtype=torch.float64
            )
            found[name] = counted(lambda model=model: model.loss(*batch(40)).backward())
        return found, sum(parameter.numel() for parameter in model.parameters())

    message = int(sum_bytes(tokens * 16 * width, world_size))  # of one sum of T h numbers
    layers = [layer_bytes(tokens, 16, width, world_size, *how) for how in ((False,), (True, True), (True, False))]
    assert layers == [4 * message, 5 * message, 4 * message]
    loss = cross_entropy_bytes(tokens, world_size, sum_element_bytes=width)
    copies, num_copies = 3 * kv_bytes(16, 4, 2, width, world_size), 6 * (world_size > 2)
    norms = 7 * norm_bytes(16, width, world_size)
    for found, num_parameters in launch(fn, world_size):
        sent = {name: sum(count[1] for count in operations.values()) for name, operations in found.items()}
        ends = 2 * message + loss + copies  # the lookup and the head's dx; sequence parallelism: in halves
        assert sent["plain"] == sent["in turn"] == 3 * layers[0] + ends
        assert sent["sequence"] == 3 * layers[1] + ends + message // 2 + norms  # and the head gathers x again
        assert sent["sequence, kept"] == 3 * layers[2] + ends + norms
        assert found["plain"] == {"all_reduce": (3 * 4 + 2 + 2 + num_copies, sent["plain"])}
        assert found["sequence"]["all_reduce"] == (2 + num_copies + 7, loss + copies + norms)
        assert num_parameters == config.num_parameters(world_size)


@pytest.mark.parametrize(
    ("config", "axes", "message"),
    [
        ({"num_heads": 6, "hidden_size": 48}, [("tp", 4)], "num_heads must divide among the ranks, got 6 on 4"),
        ({"vocabulary_size": 0}, [("tp", 1)], "sizes count from 1"),
        ({}, [("pp", 2), ("tp", 2)], "along tp and cp and replicated along dp, got pp 2 in pp 2 x tp 2 = 4 ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_any_process_starts(config, axes, message):
    with pytest.raises(ValueError, match=message):
        check_topology(LlamaConfig(**config), lab.Topology(axes))


def test_ranks_refuse_a_sequence_that_does_not_divide_and_a_state_of_another_model():
    def sequence():
        Llama(LlamaConfig(), lab.Topology([("tp", 2)]), sequence_parallel=True)(torch.zeros(1, 5, dtype=torch.int64))

    def state():
        model = Llama(LlamaConfig(), lab.Topology([("tp", 2)]))
        load_full_state_dict(model, PlainLlama(LlamaConfig(vocabulary_size=257)).state_dict())

    assert_refused(
        2,
        [
            (sequence, "shards a sequence evenly, got 5 tokens on 2 ranks; pad it to 6"),
            (state, r"embedding.weight has shape \(257, 64\), needs 256 along axis 0"),
        ],
    )
    with pytest.raises(ValueError, match="got 5 tokens on 2 ranks"):
        LlamaConfig().check(tp_size=2, num_tokens=5)
