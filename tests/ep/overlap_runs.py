"""Functions for ranks: pairs in several orders, pipelines with and without overlap, and their judge."""

import torch
from torch.nn.functional import mse_loss

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.ep.moe import ExpertParallel
from dualpipe_lab.ep.overlap import backward_alone, emulated, forward_alone
from dualpipe_lab.ep.overlap.executor import MicrobatchPass, execute
from dualpipe_lab.ep.overlap.stage import OverlappableStage
from dualpipe_lab.pp.runtime.split_backward import SplitBackward


def draw(rank, sizes, number=2, tokens=None):
    """Inputs and output gradients of a rank's microbatches."""
    generator = torch.Generator().manual_seed(100 + rank)
    shape = 2, number, sizes.tokens if tokens is None else tokens, sizes.hidden
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def grads_of(layers):
    return [p.grad for layer in layers for p in layer.parameters()]


def pairs(rank, world_size, weights, sizes, orders, ticks=(None,), even=False, tokens=None):
    """For each order: output, both input gradients, weight gradients, streams; bytes of the pair."""
    torch.manual_seed(rank)  # weights made here would be found out
    x, dy = draw(rank, sizes, tokens=None if tokens is None else tokens[rank])
    found, num_layers = [], len(weights)
    layers = emulated.make_layers(weights, even=sizes if even else None)
    for order in orders:
        for layer in layers:
            layer.zero_grad()
        for some in ticks:
            old, new = MicrobatchPass(layers, x[0]), MicrobatchPass(layers, x[1])
            execute(forward_alone(num_layers, 0), forward=old)
            old.dy = dy[0]
            comm.barrier()
            before = sent()
            streams = execute(order, new, old, some)
            num_bytes = sent() - before
            y, new.dy = new.output, dy[1]
            execute(backward_alone(num_layers, 1), backward=new)
            assert held(old) == held(new) == ["x"], "the input's gradient"
            found.append(([y, old.dx, new.dx, *grads_of(layers)], streams, num_bytes))
    return found


def held(one):
    """The names of what a microbatch holds: tensors, and graphs."""
    owners = {getattr(piece.forward, "__self__", one) for pieces in one._pieces for piece in pieces.values()}
    kept = [*one._values.items(), *one._grads.items(), *(item for owner in owners for item in vars(owner).items())]
    kept = [(name, value if isinstance(value, tuple) else (value,)) for name, value in kept]
    return [name for name, values in kept if any(isinstance(each, (torch.Tensor, SplitBackward)) for each in values)]


def sent():
    entries = lab.rank_context().ledger.entries
    return entries["all_to_all_single"].sent if "all_to_all_single" in entries else 0


def leaves_of(weights):
    """The weights of layers as leaves with a gradient, in the order of a layer's parameters, experts in full."""
    found = [[*w.attention.parameters(), *w.router.parameters(), w.gate, w.up, w.down] for w in weights]
    return [leaf.requires_grad_() for layer in found for leaf in layer]


def judge(weights, sizes, world_size, tokens=None):
    """Per rank [y, dx of the first, dx of the second microbatch], then the gradients of all weights."""
    leaves, ranks = leaves_of(weights), []
    for rank in range(world_size):
        x, dy = draw(rank, sizes, tokens=None if tokens is None else tokens[rank])
        inputs = [each.clone().requires_grad_() for each in x]
        outputs = [emulated.single_process(weights, each) for each in inputs]
        for y, grad in zip(outputs, dy, strict=True):
            y.backward(grad)
        ranks.append([outputs[1].detach(), *(each.grad for each in inputs)])
    return ranks, [torch.zeros_like(p) if p.grad is None else p.grad for p in leaves]


def pipeline(rank, world_size, program, weights, sizes, batch, options):
    """A step with two ranks per pipeline rank; gradients by stage, the most activations held."""
    torch.manual_seed(rank)
    mesh = lab.Mesh(lab.Topology([("pp", program.num_ranks), ("ep", 2)]))
    ep, per_stage = ExpertParallel(mesh.group("ep")), len(weights) // program.num_stages
    even = sizes if options["even"] else None
    stages = {}
    for index in program.stages_of(mesh.rank("pp")):
        mine = weights[index * per_stage : (index + 1) * per_stage]
        stages[index] = OverlappableStage(index, emulated.make_layers(mine, ep, even), options["ticks"])
    like = torch.empty(sizes.tokens, sizes.hidden, dtype=torch.float64)
    runtime = lab.PipelineRuntime(
        program, stages, mse_loss, like, mesh.group("pp"),
        overlapped=options["hook"],
    )  # fmt: skip
    inputs, targets = batch[mesh.rank("ep")]
    comm.barrier()
    result = runtime.step(list(inputs), list(targets))
    evaluation = runtime.evaluate(list(inputs)[: program.num_microbatches])
    assert not any(stage.num_live for stage in stages.values())
    grads = {index: grads_of(stage.layers) for index, stage in stages.items()}
    return grads, result.peak_activations, {m: y.clone() for m, y in evaluation.outputs.items()}
