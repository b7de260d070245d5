"""A dry run: one rank trains under a plan on torch's fake process group, where calls return at once and send nothing.

What it receives is zeros, and of the experts' counts what it would send itself: the tokens of all ranks choose alike.
"""

from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dualpipe_lab import comm
from dualpipe_lab.ep.deepseek_moe import DeepSeekRouter
from dualpipe_lab.ep.moe import permutation
from dualpipe_lab.launch import context
from dualpipe_lab.launch.clock import VirtualClock
from dualpipe_lab.pp.runtime import shape_inference
from dualpipe_lab.train import Batch, Trainer, TrainOptions
from dualpipe_lab.train import trainer as trainer_module


def numbers(ledger):
    """By operation: the number of calls, the bytes, and those sent to each rank."""
    return {n: (e.count, e.sent, e.received, +Counter(e.sent_to)) for n, e in sorted(ledger.entries.items())}


def dry_run(plan, config, rank, num_rows, length):
    """The calls of a rank in the second of two steps, and how many of its tokens chose each expert, by layer."""
    with fake_rank(rank, plan.world_size):
        return second_step(plan, config, num_rows, length)


@contextmanager
def fake_rank(rank, world_size):
    """This process as one of many ranks, of which there are no others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    context.install(context.RankContext(rank, world_size, VirtualClock()))
    try:
        with (
            patch.multiple(torch, empty=torch.zeros, empty_like=torch.zeros_like),
            patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
            patch.object(permutation, "exchange_counts", own_counts),
            patch.object(DeepSeekRouter, "choose", uneven_choices),
        ):
            yield
    finally:
        context.install(None)
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def own_counts(counts, group=None):
    """Exchange counts of rows with ranks whose tokens have chosen the same experts."""
    comm.all_to_all_single(torch.zeros_like(counts), counts, group=group)
    return counts[comm.get_rank(group)].expand_as(counts).contiguous()


def uneven_choices(router, logits):
    """Choose some experts more often than others, by the number of the token."""
    first = torch.arange(len(logits)).square() % router.num_experts
    return (first[:, None] + torch.arange(router.num_experts_per_token)) % router.num_experts


def second_step(plan, config, num_rows, length):
    """In a rank: its calls in the second of two steps, without the exchange of metrics, and its loads by layer."""
    batch_size = num_rows * plan.data_size * plan.num_microbatches
    trainer = Trainer(config, plan, TrainOptions(sequence_length=length, global_batch=batch_size))
    local = length if trainer.layout is None else trainer.layout.size(trainer.mesh.rank("cp"))
    generator = torch.Generator().manual_seed(trainer.data_rank)
    shape = config.vocabulary_size, (num_rows, local)
    ids = [torch.randint(*shape, generator=generator) for _ in range(plan.num_microbatches)]
    batch = Batch(ids, ids, batch_size * length, batch_size, ids, ids)
    spec = shape_inference.spec_of([trainer.model.boundary(num_rows, local)])
    exchange, update, after, loads = trainer_module.exchange, Trainer._update_biases, {}, {}

    def calls():
        return numbers(context.rank_context().ledger)

    def keep_calls(reading):
        after.update(calls())
        return exchange(reading)

    def keep_loads(self, speed):
        loads.update(loads_of(self.model))
        return update(self, speed)

    with (
        patch.object(trainer_module, "exchange", keep_calls),
        patch.object(Trainer, "_update_biases", keep_loads),
        patch.object(shape_inference, "from_header", lambda header: spec),  # in a dry run it does not arrive
    ):
        for _ in range(2):
            before = calls()
            trainer.step(batch)
    none = 0, 0, 0, Counter()
    spent = {n: tuple(b - a for a, b in zip(before.get(n, none), found, strict=True)) for n, found in after.items()}
    return {name: found for name, found in spent.items() if found[0]}, loads


def loads_of(model):
    """How many tokens of the step chose each expert, by layer."""
    for stage in model.stages.values():
        layers = list(stage.layers.named_children())
        if hasattr(stage, "mtp"):
            layers.append((model.config.num_layers, stage.mtp.layer))
        for number, layer in layers:
            router = getattr(layer.mlp, "router", None)
            if router is not None:
                yield int(number), router.load.tolist()
