"""Right answers of another style to the exercises on FlashAttention-2."""

RIGHT = {
    "flash_attention-3": {
        "key by key": """
def backward(do, dlse, q, k, v, out, lse, size):
    scale = q.shape[1] ** -0.5
    D = (out * do).sum(1)
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for j in range(len(k)):
        p = ((q * k[j]).sum(1) * scale - lse).exp()
        ds = scale * (p * ((do * v[j]).sum(1) - D) + p * dlse)
        dv[j], dk[j] = (p[:, None] * do).sum(0), (ds[:, None] * q).sum(0)
        dq.addcmul_(ds[:, None], k[j].expand_as(q))
    return dq, dk, dv
""",
        "queries in the outer loop": """
def backward(do, dlse, q, k, v, out, lse, size):
    scale = q.shape[1] ** -0.5
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for i in range(len(q)):
        for first in range(0, len(k), size):
            keys = slice(first, first + size)
            p = (k[keys] @ q[i] * scale - lse[i]).exp()
            ds = scale * p * (v[keys] @ do[i] - do[i] @ out[i] + dlse[i])
            dq[i] += ds @ k[keys]
            dk[keys] += torch.outer(ds, q[i])
            dv[keys] += torch.outer(p, do[i])
    return dq, dk, dv
""",
    },
}
