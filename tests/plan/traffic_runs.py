"""What the tests of a plan's traffic share: a rank runs steps under a plan, and compares its ledger with the plan's."""

import torch

import dualpipe_lab as lab
from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.dp import Ddp, Zero1, Zero2, ZeroOptions
from dualpipe_lab.models.rank_model import build_stages
from dualpipe_lab.pp.runtime import PipelineRuntime
from dualpipe_lab.world.context import rank_context

OPTIMIZERS = (Ddp, Zero1, Zero2)


def calls():
    """This rank's calls so far, by operation."""
    entries = rank_context().recorder.flush().ledger.entries
    return {name: (entry.count, entry.sent, entry.received) for name, entry in entries.items()}


def measure(plan, config, num_rows, length, mesh):
    """In a rank: the calls of the second of two steps under a plan, by operation."""
    layout = make_layout(plan.layout, length, plan.cp) if plan.cp > 1 else None
    dtype, narrow = getattr(torch, plan.precision), plan.precision == "bfloat16"
    program = plan.program or lab.schedules.one_f_one_b(1, plan.num_microbatches)
    options = {"sequence_parallel": plan.sequence_parallel, "layout": layout, "recompute": plan.recompute}
    model = build_stages(config, mesh, plan.program, layers=plan.layers, dtype=dtype, **options)
    zero = ZeroOptions(master=narrow, grad_dtype=torch.float32 if narrow else None, hybrid=plan.hybrid)
    optimizer = OPTIMIZERS[plan.zero](model, mesh, zero, program=plan.program)
    runtime = PipelineRuntime(program, model.stages, model.loss_fn(), group=mesh.group("pp"), sum_mirrors=True)
    local = length if layout is None else layout.size(mesh.rank("cp"))
    ids = [torch.zeros(num_rows, local, dtype=torch.int64)] * plan.num_microbatches
    model.begin_step(num_rows * length * plan.data_size * plan.num_microbatches)
    for _ in range(2):
        before = calls()
        optimizer.zero_grad()
        runtime.step(ids, ids, weights=[1.0] * plan.num_microbatches)
        optimizer.step(max_norm=1.0)
        after = calls()
    spent = {
        name: tuple(b - a for a, b in zip(before.get(name, (0, 0, 0)), now, strict=True)) for name, now in after.items()
    }
    return {name: found for name, found in sorted(spent.items()) if found[0]}


def differences(rank, plans, config, num_rows, length):
    """In a rank: for each plan, what the ledger and the plan's own prediction say; both should be equal."""
    found, meshes = {}, {}
    for plan in plans:
        mesh = meshes.setdefault(plan.topology, None) or lab.Mesh(plan.topology)
        meshes[plan.topology] = mesh
        batch_size = num_rows * plan.data_size * plan.num_microbatches
        expected = plan.traffic(config, batch_size, length).calls(rank)
        found[str(plan)] = (measure(plan, config, num_rows, length, mesh), expected)
    return found
