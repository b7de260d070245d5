"""Typical wrong answers and lazy cheats of the exercises on FlashAttention-2."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "tiled_bytes, naive_bytes, num_tiles, num_later = "

TYPICAL = {
    "flash_attention-1": {
        "no LSE": Bad(_PREDICT + "786_432, 17_301_504, 36, 26", "keeps one LSE too"),
        "copies the keys": Bad(_PREDICT + "1_064_960, 17_301_504, 36, 26", "not copied"),
        "weights alone": Bad(_PREDICT + "802_816, 16_777_216, 36, 26", "Q, K and V are kept too"),
    },
    "flash_attention-2": {
        "rescales the sum alone": Bad([("old[:, None] * weighted + p @ v", "weighted + p @ v")], "out, number"),
        "no guard": Bad([("after.masked_fill(after == -torch.inf, 0)", "after")], "-inf - (-inf) is NaN"),
    },
    "flash_attention-3": {
        "the page's backward": Bad([(" - dlse[:, None]  # dLSE / dS = P", "")], "a loss that does not use the LSE"),
        "dlse with the sign of delta": Bad([(" - dlse[:, None]", " + dlse[:, None]")], "with another sign of dlse"),
        "own delta": Bad(
            [("(dp - delta)", "(dp - (p * dp).sum(1, keepdim=True))")], "look at what is subtracted from dP"
        ),
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
    },
}
