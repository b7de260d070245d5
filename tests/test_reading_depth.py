"""What a debugger steps through in one call: functions and files of the library, `comm` and `launch` included."""

import inspect
import sys
from pathlib import Path

import torch

import dualpipe_lab as lab

PACKAGE = str(Path(lab.__file__).parent)
CEILINGS = {  # call: functions, files, as measured
    "comm.all_reduce": (10, 4),
    "ColumnParallelLinear": (19, 5),
    "DDP": (41, 13),
    "Zero1": (50, 15),
    "Zero2": (60, 14),
    "Zero3": (75, 15),
    "ring_attention": (59, 15),
    "dispatch + combine": (29, 8),
    "MoE": (73, 13),
    "build dualpipe": (9, 3),
    "simulate dualpipe": (40, 9),
    "step of gpipe": (86, 15),
    "step of dualpipe": (115, 18),
    "checkpoint.save": (86, 21),
}


def is_function(code):
    """Whether a frame is of a function: a module or a class that a lazy import runs is none, nor is a comprehension."""
    return code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.endswith(("comp>", "expr>"))


def stepped_through(body):
    """Run `body`, and return how many functions of the library it enters in this thread, and in how many files."""
    entered = set()

    def watch(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and is_function(code):
            entered.add((code.co_filename, code.co_firstlineno))

    sys.setprofile(watch)
    try:
        body()
    finally:
        sys.setprofile(None)
    return len(entered), len({file for file, _ in entered})


def trained(sharding):
    def body():
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()

    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    optimizer = sharding(model)
    return body


def pipelined(name, rank, world_size):
    from dualpipe_lab import pp

    program = pp.schedules.build(name, world_size, 2 * world_size)
    torch.manual_seed(0)  # copies of a stage begin alike
    made = [torch.nn.Linear(4, 4) for _ in range(program.num_stages)]
    stages = {action.stage: made[action.stage] for action in program.actions(rank)}
    runtime = pp.PipelineRuntime(program, stages, torch.nn.functional.mse_loss)
    data = [torch.randn(2, 4) for _ in range(2 * world_size)]
    runtime.step(data, data)  # the first compares the copies' weights
    return lambda: runtime.step(data, data)


def measured(rank, world_size, folder):
    """Functions and files of every call, the objects that it needs made before."""
    from dualpipe_lab import comm, cp, dp, ep, pp, tp

    def exchanged():
        splits = ep.exchange_splits([2, 2])
        ep.combine(ep.dispatch(x, splits), splits).sum().backward()

    x = torch.randn(4, 8, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    layout = cp.make_layout("contiguous", 4 * world_size, world_size)
    column = tp.ColumnParallelLinear(8, 8)
    moe = ep.MoE(ep.TopKRouter(8, 4, 2), ep.Experts(8, 16, 4))
    saved = dp.Zero1(torch.nn.Linear(8, 8))
    program = pp.schedules.dualpipe(8, 20)
    calls = {
        "comm.all_reduce": lambda: comm.all_reduce(torch.ones(4)),
        "ColumnParallelLinear": lambda: column(x).sum().backward(),
        **{sharding.__name__: trained(sharding) for sharding in (dp.DDP, dp.Zero1, dp.Zero2, dp.Zero3)},
        "ring_attention": lambda: cp.ring_attention(q, k, v, layout).sum().backward(),
        "dispatch + combine": exchanged,
        "MoE": lambda: moe(x).sum().backward(),
        "build dualpipe": lambda: pp.schedules.dualpipe(8, 20),
        "simulate dualpipe": lambda: pp.simulate(program),
        "step of gpipe": pipelined("gpipe", rank, world_size),
        "step of dualpipe": pipelined("dualpipe", rank, world_size),
        "checkpoint.save": lambda: dp.checkpoint.save(folder, 1, saved),
    }
    return {name: stepped_through(body) for name, body in calls.items()}


def test_a_debugger_steps_through_few_functions_and_files(tmp_path):
    found = lab.launch(measured, 2, str(tmp_path))[0]
    assert found.keys() == CEILINGS.keys()
    over = [name for name, most in CEILINGS.items() if found[name][0] > most[0] or found[name][1] > most[1]]
    assert not over, f"over their ceilings: {over}; measured: {found}"
