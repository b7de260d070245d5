"""Right answers of another style to the exercises on a loss without logits."""

RIGHT = {
    "chunked_loss-3": {
        "divided at the end": [
            ("    dx, d_weight = torch.zeros_like(x), torch.zeros_like(weight)\n    n =", "    n ="),
            ("    for c in", "    dx, d_weight = torch.zeros_like(x), torch.zeros_like(weight)\n    for c in"),
            ("        dz *= valid[:, None]\n        dz /= n\n", "        dz[~valid] = 0\n"),
            (
                "    comm.all_reduce(dx)\n    return dx, d_weight",
                "    comm.all_reduce(dx)\n    return dx / n, d_weight / n",
            ),
        ],
        "a weight for each token": [
            (
                "    n = (targets != -100).sum().clamp(min=1)\n",
                "    share = (targets != -100).double() / max(int((targets != -100).sum()), 1)\n",
            ),
            ("        dz *= valid[:, None]\n        dz /= n\n", "        dz *= share[c, None]\n"),
        ],
    },
}
