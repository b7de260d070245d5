"""Data parallelism, from one all-reduce to ZeRO-3, with checkpoints that load on another number of ranks.

On every rank (Zero2 and Zero3 in the place of Zero1; DDP, where an optimizer of torch's own follows):

    optimizer = dp.Zero1(model, mesh, lr=1e-3, max_norm=1.0)  # from here on all ranks have rank 0's weights
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()  # on this rank's rows; the gradient is of the mean over all data ranks
    report = optimizer.step()
    dp.checkpoint.save(folder, 1, optimizer)
    dp.checkpoint.load(dp.checkpoint.latest(folder), optimizer)  # on any number of ranks, under any of the three
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
