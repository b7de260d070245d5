"""Typical wrong answers and lazy cheats of the exercises on FlashAttention-2."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "tiled_bytes, naive_bytes, num_tiles, num_later = "

TYPICAL = {
    "flash_attention-1": {
        "no LSE": Bad(_PREDICT + "786_432, 17_301_504, 36, 26", "keeps one LSE too"),
        "copies the keys": Bad(_PREDICT + "1_064_960, 17_301_504, 36, 26", "not copied"),
        "weights alone": Bad(_PREDICT + "802_816, 16_777_216, 36, 26", "Q, K and V are kept too"),
        "half of the square": Bad(_PREDICT + "802_816, 17_301_504, 32, 26", "computed as a whole"),
        "top-left": Bad(_PREDICT + "802_816, 17_301_504, 36, 10", "that is top-left"),
    },
    "flash_attention-2": {
        "rescales the sum alone": Bad([("old[:, None] * weighted + p @ v", "weighted + p @ v")], "out, number"),
        "starts from zero": Bad(
            [("weighted[:, 0] - torch.inf, weighted", "weighted[:, 0].clone(), weighted")],
            "scores far below 0",
        ),
        "no guard": Bad([("after.masked_fill(after == -torch.inf, 0)", "after")], "-inf - (-inf) is NaN"),
        "no scale": Bad([("q @ k.T * q.shape[1] ** -0.5", "q @ k.T")], "number 0"),
        "no maximum": Bad([("after.masked_fill(after == -torch.inf, 0)", "0 * total")], "number"),
        "divides every time": Bad(
            [("    weighted = old[:, None] * weighted + p @ v", "    weighted = (weighted + p @ v) / total[:, None]")],
            "out, number",
        ),
        "the first maximum for good": Bad(
            """
def attend(q, tiles):
    m = torch.full_like(q[:, 0], torch.nan)
    l, A = torch.zeros_like(m), torch.zeros_like(q)
    for k, v, hidden in tiles:
        s = (q @ k.T * q.shape[1] ** -0.5).masked_fill(hidden, -torch.inf)
        own = torch.cat([s, torch.full_like(m, -torch.inf)[:, None]], 1).amax(1)
        m = torch.where(m.isnan() & (own > -torch.inf), own, m)
        p = (s - m.nan_to_num(0)[:, None]).exp()
        l, A = l + p.sum(1), A + p @ v
    return A / l.masked_fill(l == 0, 1)[:, None], torch.where(l > 0, m + l.log(), -torch.inf)
""",
            "1600 higher in each tile than in the last",
        ),
        "the maximum of the tile": Bad([("torch.maximum(largest, s.amax(1))", "s.amax(1)")], "is -inf, expected"),
    },
    "flash_attention-3": {
        "powers before they are divided": Bad(
            [("(scale * q @ k[keys].T - lse[:, None]).exp()", "(scale * q @ k[keys].T).exp() / lse.exp()[:, None]")],
            "scores near 800",
        ),
        "the page's backward": Bad([(" - dlse[:, None]  # dLSE / dS = P", "")], "a loss that does not use the LSE"),
        "dlse with the sign of delta": Bad([(" - dlse[:, None]", " + dlse[:, None]")], "with another sign of dlse"),
        "dlse once per key": Bad(
            [
                (" - dlse[:, None]  # dLSE / dS = P", ""),
                ("ds = scale * p * (dp - delta)", "ds = scale * (p * (dp - delta) + dlse[:, None])"),
            ],
            "look at what is subtracted from dP",
        ),
        "dlse in the output's gradient": Bad(
            [
                (" - dlse[:, None]  # dLSE / dS = P", ""),
                ("dv[keys] = p.T @ do", "dv[keys] = p.T @ (do + dlse[:, None])"),
            ],
            "dV, number",
        ),
        "own delta": Bad(
            [("(dp - delta)", "(dp - (p * dp).sum(1, keepdim=True))")], "look at what is subtracted from dP"
        ),
        "own average": Bad(
            [("(dp - delta)", "(dp - (p * dp).sum(1, keepdim=True) / p.sum(1, keepdim=True))")],
            "moves from one block to another",
        ),
        "own LSE": Bad(
            [("(scale * q @ k[keys].T - lse[:, None]).exp()", "(scale * q @ k[keys].T).softmax(1)")],
            "2 times all dO together",
        ),
        "scaled twice": Bad([("dk[keys] = ds.T @ q", "dk[keys] = scale * ds.T @ q")], "dK, number 0"),
        "last block wins": Bad([("dq += ds", "dq = ds")], "dQ, number"),
    },
}

CHEATS = {
    "flash_attention-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "tiled_bytes = naive_bytes = num_tiles = num_later = Anything()", "must be a whole number"
        ),
    },
    "flash_attention-2": {
        "collects the tiles": Bad(
            """
def attend(q, tiles):
    kept = [(k.clone(), v.clone(), hidden) for k, v, hidden in tiles]
    if not kept:
        return torch.zeros_like(q), q[:, 0] * 0 - torch.inf
    k, v = (torch.cat([tile[i] for tile in kept]) for i in range(2))
    s = (q @ k.T * q.shape[1] ** -0.5).masked_fill(torch.cat([tile[2] for tile in kept], 1), -torch.inf)
    return s.softmax(1).nan_to_num(0) @ v, s.logsumexp(1)
""",
            "are alive after two tiles",
        ),
        "keeps the tiles": Bad(
            """
def attend(q, tiles):
    tiles = list(tiles) or [(q[:0], q[:0], q[:, :0] > 0)]
    k, v, hidden = (torch.cat([tile[i] for tile in tiles], 1 if i == 2 else 0) for i in range(3))
    s = (q @ k.T * q.shape[1] ** -0.5).masked_fill(hidden, -torch.inf)
    return s.softmax(1) @ v, s.logsumexp(1)
""",
            "overwritten with NaN",
        ),
        "the library's own": Bad(
            """
def attend(q, tiles):
    from dualpipe_lab.cp.flash_attention import FlashTiles
    found = FlashTiles()
    return found.forward(q, q, q, None, 1.0)
""",
            "the library's own is switched off",
        ),
    },
    "flash_attention-3": {
        "one block": Bad(
            [("range(0, len(k), size)", "range(0, len(k), len(k))"), ("first + size", "len(k)")],
            "a tensor of 144 numbers was made",
        ),
        "every tile is kept": Bad(
            """
def backward(do, dlse, q, k, v, out, lse, size):
    scale = q.shape[1] ** -0.5
    parts = [slice(first, first + size) for first in range(0, len(k), size)]
    all_p = [(scale * q @ k[keys].T - lse[:, None]).exp() for keys in parts]
    all_dp = [do @ v[keys].T for keys in parts]
    delta = sum((p * dp).sum(1, keepdim=True) for p, dp in zip(all_p, all_dp))
    all_ds = [scale * p * (dp - delta + dlse[:, None]) for p, dp in zip(all_p, all_dp)]
    dq = sum(ds @ k[keys] for ds, keys in zip(all_ds, parts))
    return dq, torch.cat([ds.T @ q for ds in all_ds]), torch.cat([p.T @ do for p in all_p])
""",
            "kept tile by tile they are a matrix of all scores too",
        ),
        "autograd": Bad(
            """
def backward(do, dlse, q, k, v, out, lse, size):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        q, k, v = leaves
        s = q @ k.T * q.shape[1] ** -0.5
        return torch.autograd.grad((s.softmax(1) @ v, s.logsumexp(1)), leaves, (do, dlse))
""",
            "a tensor of",
        ),
    },
}
