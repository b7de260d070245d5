"""What the tests of memory share: models, bytes that autograd holds, FLOPs that overlapped stages repeat."""

import dataclasses
import sys
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dualpipe_lab.ep.overlap import execute, forward_alone, overlappable_stage
from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.pp import Action, ReadyAction
from dualpipe_lab.train import Trainer, TrainOptions

LENGTH = 8
CONFIG = LlamaConfig(
    vocabulary_size=19, hidden_size=8, ffn_size=10, num_layers=5, num_heads=4, num_kv_heads=2, qk_norm=True
)
V3 = V3MoEConfig(
    vocabulary_size=19, hidden_size=8, ffn_size=10, num_layers=5, num_heads=4, num_kv_heads=2, expert_ffn_size=6,
    num_experts=4, num_groups=2, num_groups_per_token=1,
)  # fmt: skip


class Flops(TorchDispatchMode):
    """FLOPs of matrix products that run meanwhile."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func._overloadpacket):
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


class Held:
    """Bytes that a stage holds for the backward of one microbatch, and not for its weights."""

    def __init__(self, stage):
        self.ignored = {one.untyped_storage().data_ptr() for one in (*stage.parameters(), *stage.buffers())}
        self.storages, self.rows = {}, None

    def saving(self):
        return torch.autograd.graph.saved_tensors_hooks(self.add, lambda saved: saved)

    def add(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.ignored:
            self.storages[storage.data_ptr()] = storage  # held, so that no other tensor gets its place
        return tensor

    def walk(self, value):
        """Add the tensors of what a pass holds, and those that nodes of its graphs have as attributes."""
        if isinstance(value, torch.Tensor):
            self.add(value)
        elif isinstance(value, dict | tuple | list):
            for one in value.values() if isinstance(value, dict) else value:
                self.walk(one)
        elif dataclasses.is_dataclass(value):
            self.walk([getattr(value, field.name) for field in dataclasses.fields(value)])
        elif hasattr(value, "_roots"):
            self.walk_nodes([edge.node for edge in value._roots])

    def walk_nodes(self, todo):
        """Add what nodes hold as attributes, and keep the number of rows of the last layer with experts."""
        seen = set()
        while todo:
            if (node := todo.pop()) is None or node in seen:
                continue
            seen.add(node)
            self.walk(getattr(node, "__dict__", {}))
            self.rows = sum(node.routes.counts) if hasattr(node, "routes") else self.rows
            todo += [parent for parent, _ in node.next_functions]

    @property
    def num_bytes(self):
        return sum(storage.nbytes() for storage in self.storages.values())


def counted(config, plan, length):
    """In a rank: by stage, bytes held behind the forward of a microbatch, experts' rows, FLOPs that are repeated."""
    trainer = Trainer(
        config, plan, TrainOptions(sequence_length=length, global_batch=plan.data_size * plan.num_microbatches)
    )
    flops, found = _count_repeated(), {}
    for index, module in trainer.model.stages.items():
        stage, held = overlappable_stage(module, index), Held(module)
        x = ids = torch.zeros(1, length // plan.cp, dtype=torch.long)
        if module.embedding is None:
            local = ids.shape[1] // plan.tp if plan.sequence_parallel else ids.shape[1]
            x = torch.randn(1, local, config.hidden_size).to(module.dtype).requires_grad_()
        loss_of = None if module.head is None else partial(_loss, trainer.loss_fn)
        ready = ReadyAction(stage, Action(index, "F", 0), (x,), loss_of=loss_of, target=ids)
        with stage.running(ready) as one, held.saving():
            execute(forward_alone(one.letters), forward=one, traced=False)
        owners = [
            piece.forward.__self__ for pieces in one._pieces for letter, piece in pieces.items() if letter in "APSM"
        ]
        rows = [sum(each.routes.counts) for each in owners if hasattr(each, "routes")]
        held.walk([one._values, one._grads, *(vars(each) | {"_seed": None} for each in owners)])
        flops.total = 0
        stage.backward(0, () if loss_of else (torch.ones_like(one.output),))
        found[index] = held.num_bytes, rows, flops.total
    return found


def _loss(loss_fn, ids, output):
    return loss_fn(output, ids)


def _count_repeated():
    """Count the products of every second forward of `recompute` from now on."""
    region, flops = sys.modules["dualpipe_lab.pp.runtime.recompute"]._Region, Flops()
    run_again = region._run_again

    def counting(self):
        with flops:
            run_again(self)

    region._run_again = counting
    return flops
