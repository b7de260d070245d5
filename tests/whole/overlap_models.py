"""In a rank: a step of a V3 model on a pipeline with interruptible stages, and its distance from one process."""

import torch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.cp.ring_attention import ring_attention
from dualpipe_lab.cp.sequence import positions, shard
from dualpipe_lab.dp.ddp import Ddp
from dualpipe_lab.dp.sharded import full_gradients
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.ep.moe import ExpertParallel, expert_parameters
from dualpipe_lab.ep.overlap import interruptible_stage, overlapped_forward_backward
from dualpipe_lab.models.plain_v3_moe import PlainV3MoE
from dualpipe_lab.models.v3_moe import V3Layer
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime.recompute import recompute
from dualpipe_lab.pp.runtime.stage import WithLoss, run_pair_serially
from dualpipe_lab.tp.attention import causal_attention
from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.embedding import VocabParallelEmbedding
from dualpipe_lab.tp.gqa import kv_replicas
from dualpipe_lab.tp.lm_head import LMHead
from dualpipe_lab.tp.rms_norm import RMSNorm
from dualpipe_lab.tp.shard import initialize_parameters, shards_of

CONFIG = V3MoEConfig(
    vocabulary_size=29, hidden_size=12, num_layers=5, num_dense_layers=1, num_heads=2, num_kv_heads=1, ffn_size=20,
    expert_ffn_size=6, balance=0.3,
)  # fmt: skip
ROWS, LENGTH = 2, 8
OPTIMIZERS = {"Ddp": Ddp, "Zero1": Zero1, "Zero2": Zero2}
HOOKS = {"overlapped": overlapped_forward_backward, "serial": run_pair_serially}


class V3Stage(nn.Module):
    """Some layers of a V3 model, with the names and numbers of the full one."""

    def __init__(self, config, mesh, layers, ends, again=False):
        super().__init__()
        self.config, self.mesh, self.recompute, self.num_sequences = config, mesh, again, None
        self.layout = make_layout("zigzag", LENGTH, mesh.size("cp")) if mesh.size("cp") > 1 else None
        tp, hidden, dtype = TensorParallel(mesh.group("tp")), config.hidden_size, torch.float64
        ep = ExpertParallel(mesh.group("ep"), mesh.group(*(a for a in ("dp", "cp") if a in mesh.topology.names)))
        replicas = kv_replicas(config.num_kv_heads, tp)
        self.embedding = VocabParallelEmbedding(config.vocabulary_size, hidden, tp, dtype=dtype) if ends[0] else None
        self.layers = nn.ModuleList()
        for number in layers:
            mine = ep if number >= config.num_dense_layers else None
            cp = None if self.layout is None else mesh.group("cp")
            layer = V3Layer(config, tp, mine, None, replicas, self.attend(), dtype, cp)
            self.layers.add_module(str(number), layer)
        self.norm = RMSNorm(hidden, config.eps, tp, dtype=dtype) if ends[1] else None
        self.head = LMHead(hidden, config.vocabulary_size, tp, dtype=dtype) if ends[1] else None
        initialize_parameters(self)
        for number, layer in self.layers.named_children():
            if hasattr(layer.mlp, "router"):
                layer.mlp.router.bias.copy_(bias_of(int(number), config))

    def attend(self):
        if self.layout is None:
            return causal_attention
        return lambda q, k, v: ring_attention(q, k, v, layout=self.layout, group=self.mesh.group("cp"))

    def enter(self, x):
        return self.embedding(x)

    def leave(self, x):
        return self.head(self.norm(x))

    def positions(self, device):
        return None if self.layout is None else positions(self.layout, self.mesh.rank("cp"), device)

    def forward(self, x):
        x = x if self.embedding is None else self.enter(x)
        balance = torch.zeros((), dtype=torch.float64)
        for layer in self.layers:
            inputs = x, self.positions(x.device), self.num_sequences
            x, loss = recompute(layer, *inputs) if self.recompute else layer(*inputs)
            balance = balance if loss is None else balance + loss
        return WithLoss(x if self.head is None else self.leave(x), self.config.balance * balance)


def bias_of(number, config):
    generator = torch.Generator().manual_seed(number)
    return 0.5 * torch.randn(config.num_experts, generator=generator, dtype=torch.float64)


def batch(config, number, num_data):
    """`ids` and `targets` of all data ranks, [rank, microbatch, row, token]."""
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(config.vocabulary_size, (2, num_data, number, ROWS, LENGTH), generator=generator)
    targets[0, 0, 0, :3] = -100  # microbatches have unequal numbers of targets
    return ids, targets


def one_process(config, number, num_data):
    """Loss, gradients, and the load of each router."""
    model = PlainV3MoE(config, torch.float64)
    initialize_parameters(model)
    loads = {}
    for place, layer in enumerate(model.layers):
        if hasattr(layer.mlp, "router"):
            layer.mlp.router.selection_bias = bias_of(place, config)
            layer.mlp.router.register_forward_hook(
                lambda _, x, out, place=place: loads.update({place: out[1].flatten().bincount(minlength=8)})
            )
    ids, targets = batch(config, number, num_data)
    loss = model.loss(ids.flatten(0, 2), targets.flatten(0, 2))
    loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return loss.detach(), grads, loads


def make_stages(config, mesh, program, layers, again):
    """This rank's stages; `layers`: numbers of layers of all stages."""
    bounds = [sum(layers[:number]) for number in range(len(layers) + 1)]
    mine = sorted({action.stage for action in program.actions(mesh.rank("pp"))})
    return {
        s: V3Stage(config, mesh, range(bounds[s], bounds[s + 1]), (s == 0, s == len(layers) - 1), again) for s in mine
    }


def run(config, axes, name, number, layers, hook="overlapped", plain=(), again=False, fill=True, zero=None):
    """Return errors of loss, evaluation and gradients; the loads of this rank's routers, once per rank of tp."""
    mesh = lab.Mesh(lab.Topology(axes))
    program = schedules.build(name, mesh.size("pp"), number)
    modules = make_stages(config, mesh, program, layers, again)
    num_data = mesh.size("dp") * mesh.size("ep")
    ids, targets = batch(config, number, num_data)
    num_tokens, mine = int((targets >= 0).sum()), mesh.rank("dp") * mesh.size("ep") + mesh.rank("ep")
    ids, targets = ids[mine], targets[mine]
    if mesh.size("cp") > 1:
        layout = make_layout("zigzag", LENGTH, mesh.size("cp"))
        ids, targets = (shard(each, layout, mesh.rank("cp"), dim=-1) for each in (ids, targets))
    for stage in modules.values():
        stage.num_sequences = num_data * number * ROWS
    stages = {s: m if s in plain else interruptible_stage(m, s, fill=fill) for s, m in modules.items()}

    optimizer = zero and OPTIMIZERS[zero](nn.ModuleDict({str(s): m for s, m in modules.items()}), mesh.group("dp"))

    def loss_fn(logits, targets):
        return modules[len(layers) - 1].head.loss_of(logits, targets, num_tokens=num_tokens)

    runtime = lab.PipelineRuntime(
        program, stages, loss_fn, group=mesh.group("pp"), overlapped=HOOKS[hook],
        sum_mirrors=program.num_directions == 2,
    )  # fmt: skip
    ones, calls = [1.0] * number, count_calls(modules)
    result = runtime.step(list(ids), list(targets), ones)
    loads = loads_of(modules) if mesh.rank("tp") == 0 else {}
    evaluation = runtime.evaluate(list(ids), list(targets), ones)
    assert not any(stage.num_live for stage in runtime._stages.values())
    if optimizer:
        keep_sums(optimizer, modules)
    expected, grads, _ = one_process(config, number, num_data)
    data = mesh.group(*(axis for axis in ("dp", "ep", "cp") if axis in mesh.topology.names), "pp")
    found = sum_of([*result.losses.values(), *result.stage_losses.values()], data)
    heads = sum_of(evaluation.losses.values(), data), sum_of(result.losses.values(), data)
    errors = {"loss": float(abs(found - expected))}
    backwards = {s: sum(a.kind in "BW" and a.stage == s for a in program.actions(mesh.rank("pp"))) for s in modules}
    assert all(len(each) == 1 and each.pop() == backwards[s] for s, each in calls().items())
    if config.balance == 0:
        errors["evaluation"] = float(abs(heads[0] - heads[1]))
    for module in modules.values():
        errors |= gradient_errors(module, mesh, grads, () if optimizer else ("dp",))
    return errors, loads


def sum_of(losses, group):
    total = torch.stack([torch.zeros((), dtype=torch.float64), *losses]).sum()
    comm.all_reduce(total, group=group)
    return total


def loads_of(modules):
    return {
        int(number): layer.mlp.router.load.clone()
        for module in modules.values()
        for number, layer in module.layers.named_children()
        if hasattr(layer.mlp, "router")
    }


def count_calls(modules):
    """Return a function that returns, by stage, how often the hooks of its parameters have been called."""
    counts = {s: dict.fromkeys(module.parameters(), 0) for s, module in modules.items()}

    def count(s):
        return lambda parameter: counts[s].update({parameter: counts[s][parameter] + 1})

    for s, module in modules.items():
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(count(s))
    return lambda: {s: set(each.values()) for s, each in counts.items()}


def keep_sums(optimizer, modules):
    """Put the sums along dp into `.grad`, in full."""
    found = full_gradients(optimizer)
    for number, module in modules.items():
        for name, parameter in module.named_parameters():
            parameter.grad = found[f"{number}.{name}"]


def gradient_errors(module, mesh, grads, dp):
    """Sum this stage's gradients over the ranks with other data, and compare them with their shards."""
    shards, experts = shards_of(module), {id(p) for p in expert_parameters(module)}
    errors = {}
    for name, parameter in module.named_parameters():
        axes = (*dp, "cp") if id(parameter) in experts else (*dp, "ep", "cp")
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        comm.all_reduce(grad, group=mesh.group(*(axis for axis in axes if axis in mesh.topology.names)))
        expected = grads[name] if name not in shards else shards[name].of(grads[name])
        errors[name] = float((grad - expected).abs().max() / max(1e-30, float(expected.abs().max())))
    return errors


def worst(results):
    """The largest error of all ranks, and its name."""
    return max((error, name) for errors, _ in results for name, error in errors.items())


def added(results):
    """The load of each layer, over all ranks."""
    total = {}
    for _, loads in results:
        for place, load in loads.items():
            total[place] = total.get(place, 0) + load
    return total
