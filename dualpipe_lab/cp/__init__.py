"""Context parallelism, from a ring all-reduce by hand to a balanced ring attention.

On every rank, for q, k, v of this rank's tokens, `[batch, heads, tokens, head size]`:

    layout = cp.make_layout("zigzag", 16, 2)  # which of 16 tokens each of 2 ranks holds
    mine = cp.shard_sequence(ids, layout, mesh.rank("cp"))  # labels: cp.next_token_labels(ids) first, sharded alike
    q, k, v = attention_inputs(mine)
    out = cp.ring_attention(q, k, v, layout, group=mesh.group("cp"))  # keys and values travel, in the backward too
    optimizer = dp.Zero1(model, mesh, lr=1e-3)  # all ranks of cp hold all weights: it sums their gradients
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
