"""Typical wrong answers and lazy cheats of the exercises on ring attention."""

from bad_answer import Bad

TYPICAL = {
    "ring_attention-4": {
        "as it was": Bad(
            [("found = [(out, lse)] * len(blocks)", "pass")],
            "its weights add up to 1 in every block",
        ),
        "the LSE alone": Bad(
            [("found = [(out, lse)] * len(blocks)", "found = [(own, lse) for own, _ in found]")],
            "what is subtracted from dP is a sum over the keys of all blocks",
        ),
        "no guard": Bad([("base = lse.masked_fill(lse == -torch.inf, 0)", "base = lse")], "a query may see nothing"),
    },
    "ring_attention-7": {
        "one hop short": Bad(
            [
                (
                    "if num > 1:  # gradients take N hops, the last of them to the owner of the block",
                    "if step < num - 1:",
                )
            ],
            "one more hop takes them to its owner",
        ),
        "the LSE of the own block": Bad(
            [("out, top + total.log())", "out, _scores(q, k, 0).logsumexp(-1))")],
            "The weights of the backward are exp(score - LSE), with the LSE of all keys",
        ),
        "delta of one block": Bad(
            [("dout @ block[1].mT - delta", "dout @ block[1].mT - (weights * (dout @ block[1].mT)).sum(-1, True)")],
            "what is subtracted from dP was summed over one block",
        ),
    },
}

CHEATS = {
    "ring_attention-4": {
        "autograd": Bad(
            """
def gradients(do, q, blocks, found, block_backward):
    q = q.clone().requires_grad_()
    pairs = [(k.clone().requires_grad_(), v.clone().requires_grad_()) for k, v, _ in blocks]
    s = torch.cat([(q @ k.T * q.shape[1] ** -0.5).masked_fill(b[2], -torch.inf) for (k, _), b in zip(pairs, blocks)], 1)
    s = s.masked_fill((s == -torch.inf).all(1, keepdim=True), -1e300)
    (s.softmax(1) @ torch.cat([v for _, v in pairs]) * do).sum().backward()
    return q.grad, [(k.grad, v.grad) for k, v in pairs]
""",
            "the exercise is to write this yourself",
        ),
    },
    "ring_attention-7": {
        "autograd inside": Bad(
            [
                (
                    "dq += ds @ block[0]",
                    "dq += torch.autograd.grad((q @ block[0].mT).sum(), q)[0]",
                )
            ],
            "torch.autograd.grad is off in ring_attention",
        ),
        "gathers once and keeps": Bad(
            """
import torch
from mine.ring import all_gather, reduce_scatter
from dualpipe_lab.comm import get_rank

class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ranks):
        n, me = q.shape[1], ranks.index(get_rank())
        keys, values = (all_gather(x.transpose(0, 1).contiguous(), ranks).transpose(0, 1) for x in (k, v))
        hidden = torch.arange(len(ranks) * n) > torch.arange(me * n, me * n + n)[:, None]
        lse = (q @ keys.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf).logsumexp(-1, keepdim=True)
        p = ((q @ keys.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf) - lse).exp()
        ctx.save_for_backward(q, keys, values, p)
        ctx.ranks = ranks
        return p @ values

    @staticmethod
    def backward(ctx, dout):
        q, keys, values, p = ctx.saved_tensors
        dp = dout @ values.mT
        ds = q.shape[-1] ** -0.5 * p * (dp - (p * dp).sum(-1, keepdim=True))
        dk, dv = ((x.mT @ y).transpose(0, 1).contiguous() for x, y in ((ds, q), (p, dout)))
        return ds @ keys, *(reduce_scatter(x, ctx.ranks).transpose(0, 1) for x in (dk, dv)), None
""",
            "bytes were alive after the forward",
        ),
    },
}
