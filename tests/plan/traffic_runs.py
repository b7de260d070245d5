"""What the tests of a plan's traffic share: a rank trains under a plan, and compares its ledger with the plan's."""

from collections import Counter

import torch

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.train import Batch, Trainer, TrainOptions
from dualpipe_lab.train import trainer as trainer_module


def calls():
    """This rank's calls so far, by operation: their number, the bytes, and those sent to each rank."""
    return numbers(rank_context().recorder.flush().ledger)


def numbers(ledger):
    return {n: (e.count, e.sent, e.received, +Counter(e.sent_to)) for n, e in sorted(ledger.entries.items())}


def train(plan, config, num_rows, length):
    """In a rank: the calls of the second of two steps under a plan, without the exchange of metrics, and its loads."""
    batch_size = num_rows * plan.data_size * plan.num_microbatches
    trainer = Trainer(config, plan, TrainOptions(sequence_length=length, global_batch=batch_size))
    local = length if trainer.layout is None else trainer.layout.size(trainer.mesh.rank("cp"))
    generator = torch.Generator().manual_seed(trainer.data_rank)
    ids = [
        torch.randint(config.vocabulary_size, (num_rows, local), generator=generator)
        for _ in range(plan.num_microbatches)
    ]
    batch, exchange, update = (
        Batch(ids, ids, batch_size * length, batch_size, ids, ids),
        trainer_module.exchange,
        Trainer._update_biases,
    )
    snapshots, loads = [], {}

    def keep_loads(self, speed):
        loads.update({(rank_context().rank, layer): load for layer, load in loads_of(self.model)})
        return update(self, speed)

    trainer_module.exchange = lambda reading: (snapshots.append(calls()), exchange(reading))[1]
    Trainer._update_biases = keep_loads
    try:
        for _ in range(2):
            before = calls()
            trainer.step(batch)
    finally:
        trainer_module.exchange, Trainer._update_biases = exchange, update
    found = {}
    for name, after in sorted(snapshots[-1].items()):
        spent = tuple(b - a for a, b in zip(before.get(name, (0, 0, 0, Counter())), after, strict=True))
        if spent[0]:
            found[name] = spent
    return found, loads


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


def differences(rank, plans, config, num_rows, length):
    """In a rank: for each plan, what the ledger and the plan's own prediction say; both should be equal."""
    found = {}
    for plan in plans:
        batch_size = num_rows * plan.data_size * plan.num_microbatches
        measured, loads = train(plan, config, num_rows, length)
        routing = {key: load for one in comm.all_gather_object(loads) for key, load in one.items()}
        step = plan.traffic(config, batch_size, length, routing)
        found[str(plan)] = (measured, numbers(step.ledger.ranks[rank]))
    return found


def assert_exact(plans, config, num_rows=2, length=8):
    """Train under each plan, all of one number of ranks, and compare every rank's calls."""

    def fn(rank, world_size):
        return differences(rank, plans, config, num_rows, length)

    launched = lab.launch(fn, plans[0].world_size, output="collect", timeout=240)
    for rank, found in enumerate(launched):
        assert len(found) == len(plans)
        for plan, (measured, expected) in found.items():
            assert measured == expected, f"rank {rank}, {plan}"
            assert sum(sent for _, sent, *_ in measured.values()) > 0, f"rank {rank}, {plan}: nothing was sent"
