"""A V3 model trained with and without a placement: losses, norms, raw gradients and weights by their full names."""

import torch
from ep_runs import distance
from runs import A1

import dualpipe_lab as lab
from dualpipe_lab.dp import Ddp, Hyperparameters, Zero1, Zero2, Zero3, ZeroOptions
from dualpipe_lab.dp.sharded import full_gradients
from dualpipe_lab.ep.eplb import ExpertPlacement, rebalance_experts
from dualpipe_lab.ep.moving_experts import rebalance
from dualpipe_lab.ep.placed_experts import place_experts
from dualpipe_lab.models.rank_model import build_stages
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime import PipelineRuntime

CONFIG = V3MoEConfig(
    vocabulary_size=19, hidden_size=8, num_layers=3, num_dense_layers=1, num_heads=2, num_kv_heads=2, ffn_size=12,
    num_groups=2, num_groups_per_token=2, expert_ffn_size=6, balance=1e-2,
)  # fmt: skip
LOADS = [[9.0, 1, 7, 1, 2, 5, 1, 3], [1.0, 2, 1, 8, 6, 1, 4, 1]]
STAGES = {"ddp": Ddp, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
ROWS, LENGTH, STEPS, MAX_NORM = 16, 3, 3, 0.5


def plan(num_ranks, num_slots=12):
    return ExpertPlacement(*rebalance_experts(LOADS, num_slots, 1, 1, num_ranks))


class Run:
    """This rank's model, optimizer and data."""

    def __init__(self, topology, stage, placement=None, **options):
        self.mesh = lab.Mesh(topology)
        program = schedules.build("1f1b", 1, 2)
        dtype = options.pop("dtype", torch.float64)
        self.model = build_stages(CONFIG, self.mesh, dtype=dtype, seed=3)
        self.layers = [] if placement is None else place_experts(self.model, placement)
        units = [[*self.model.stages.values()]] if stage == "zero3" else []
        settings = ZeroOptions(Hyperparameters(lr=1e-2, eps=1e-3), bucket_bytes=2000, **options)
        self.optimizer = STAGES[stage](self.model, *units, self.mesh, settings)
        self.runtime = PipelineRuntime(
            program, self.model.stages, self.model.loss_fn(), group=self.mesh.group("pp"), sum_mirrors=True
        )

    def batch(self, step):
        ids = torch.randint(19, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        data = self.mesh.group(*(axis for axis in ("dp", "ep") if axis in self.mesh.topology.names))
        mine = ids.chunk(lab.comm.get_world_size(data))[lab.comm.get_rank(data)]
        return list(mine.chunk(2)), [(part * 3 + 1) % 19 for part in mine.chunk(2)]

    def step(self, step):
        """Loss of all ranks, norm, and gradients by their full names."""
        self.optimizer.zero_grad()
        self.model.begin_step(ROWS * LENGTH, ROWS)
        inputs, targets = self.batch(step)
        result = self.runtime.step(inputs, targets, weights=[1.0, 1.0])
        losses = [*result.losses.values(), *result.stage_losses.values()]
        loss = sum(losses).detach().double() / self.mesh.size("tp")
        lab.comm.all_reduce(loss)
        grads = self.gradients()
        report = self.optimizer.step(max_norm=MAX_NORM)
        assert report.stepped
        loads = self.model.update_biases(1e-2)
        return loss, report.norm, grads, loads

    def gradients(self):
        """Gather the full gradients; the parameters get none."""
        named = full_gradients(self.optimizer)
        kept = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            parameter.grad = named[name]
        found = {name: grad.clone() for name, grad in self.full("grad").items()}
        for name, parameter in self.model.named_parameters():
            parameter.grad = kept[name]
        return found

    def full(self, of="parameter"):
        with self.optimizer.gathered():
            return {name: value.clone() for name, value in self.model.full_state_dict(of).items()}

    def replicas(self):
        """All slots of all layers, weights and moments, in full on every rank of ep: `[slots, numel]` by layer."""
        found = []
        for layer in self.layers:
            rows = [self.state(parameter) for parameter in layer.weights]
            local = torch.cat([value.reshape(len(layer.span), -1) for each in rows for value in each], 1)
            full = local.new_empty(layer.num_slots, local.shape[1])
            lab.comm.all_gather_single(full.view(-1), local.reshape(-1).contiguous(), layer.ep.group)
            found.append((layer.table, full))
        return found

    def state(self, parameter):
        """All state of a parameter, in its shape."""
        from dualpipe_lab.dp.slots import gathered

        found = []
        for shard in self.optimizer.local_shards:
            places = [n for n, held in enumerate(shard.bucket.parameters) if held is parameter]
            for flat in shard.adam.state_dict().values() if places else ():
                full = gathered(shard.bucket, flat, self.optimizer.is_sharded)
                found.append(shard.bucket.views(full)[places[0]].detach().clone().double())
        return found

    def train(self, moves=0, steps=STEPS):
        """Steps, and after each a plan from its loads that may change some slots."""
        found, moved = [], []
        for step in range(steps):
            *numbers, loads = self.step(step)
            found.append(numbers)
            if moves:
                moved.append([report.num_slots for report in rebalance(self.layers, loads, self.optimizer, moves)])
        return found, self.full(), self.replicas(), moved


def equal_replicas(found):
    """Every replica has the bits of its expert's lowest slot, in weights and moments."""
    for table, rows in found:
        firsts = [table.index(expert) for expert in table]
        assert len(set(firsts)) < len(table)
        assert torch.equal(rows, rows[firsts])


def check(found, expected, moved=False):
    """Compare what `train` returns."""
    for (loss, norm, grads), (right, right_norm, plain) in zip(found[0], expected[0], strict=True):
        assert abs(loss - right) <= 1e-10 * abs(right)
        assert abs(norm - right_norm) <= 1e-10 * right_norm
        assert grads.keys() == plain.keys()
        for name, grad in grads.items():
            assert distance(grad, plain[name]) <= A1, name
    for name, weight in found[1].items():
        assert distance(weight, expected[1][name]) <= 1e-10, name
    equal_replicas(found[2])
    if moved:
        assert all(sum(each) for each in zip(*found[3], strict=True))
