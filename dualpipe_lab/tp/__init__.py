"""Tensor parallelism, from two conjugate operators to a transformer block; every backward is written out.

On every rank:

    ranks = tp.TensorParallel(mesh.group("tp"))  # its layers are given the same one
    model = nn.Sequential(tp.ColumnParallelLinear(8, 32, tp=ranks), tp.RowParallelLinear(32, 8, tp=ranks))
    tp.load_full_state_dict(model, full)  # this rank's shards of full weights
    optimizer = dp.Zero1(model, mesh, lr=1e-3)  # it sums the gradients of replicated weights over tp
    loss_fn(model(x), y).backward()  # the same rows on all ranks of tp
    optimizer.step()
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
