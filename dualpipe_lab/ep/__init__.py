"""Expert parallelism, from an all-to-all by hand to a V3-style layer whose exchange is hidden.

On every rank, each with its own tokens:

    ranks = ep.ExpertParallel(mesh.group("ep"))
    layer = ep.MoE(ep.TopKRouter(8, 4, 2), ep.Experts(8, 16, 4, ep=ranks))  # 4 experts, 2 for each token
    optimizer = dp.Zero1(layer, mesh, lr=1e-3)  # it sums experts over their copies, the router over all ranks
    y = layer(x)  # tokens travel to their experts and back; ep.DeepSeekMoE has shared experts and balances by biases
    y.sum().backward()
    optimizer.step()
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
