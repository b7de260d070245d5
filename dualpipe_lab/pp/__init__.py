"""Pipeline parallelism: programs as data, what they cost, and the runtime that executes them on real ranks.

The first two lines anywhere, the others on every rank:

    program = pp.schedules.build("dualpipe", 2, 4)  # print(program), pp.simulate(program), pp.explain(program)
    pp.check(program, every, loss_fn, x, y)  # all stages in one process: finds errors before a rank starts
    stages = nn.ModuleDict({str(i): every[i] for i in program.stages_of(rank)})
    optimizer = dp.Zero1(stages, mesh, lr=1e-3, program=program)  # sums over data ranks, mirrors and tied weights
    runtime = pp.PipelineRuntime(program, stages, loss_fn, group=mesh.group("pp"))
    result = runtime.step(x, y)  # gradients are in `.grad`, the losses on the ranks of the last stage
    optimizer.step()
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
