"""Right answers of another style to the exercises on GPipe."""

RIGHT = {
    "gpipe-2": {
        "the last microbatch first": """
def gpipe_rows(num_ranks, num_microbatches):
    def row(r):
        words = []
        for kind, order in (("F", range(num_microbatches)), ("B", reversed(range(num_microbatches)))):
            for m in order:
                source = r > 0 if kind == "F" else r + 1 < num_ranks
                target = r + 1 < num_ranks if kind == "F" else r > 0
                words += [f"{r}RECV_{kind}{m}"] * source + [f"{r}{kind}{m}"] + [f"{r}SEND_{kind}{m}"] * target
        return " ".join(words)

    return [row(r) for r in range(num_ranks)]
""",
        "one text of many lines": """
def gpipe_rows(num_ranks, num_microbatches):
    def words(r, m, kind, source, target):
        exists = [0 <= source < num_ranks, True, 0 <= target < num_ranks]
        return [w for w, there in zip((f"{r}RECV_{kind}{m}", f"{r}{kind}{m}", f"{r}SEND_{kind}{m}"), exists) if there]

    M = range(num_microbatches)
    down = [[w for m in M for w in words(r, m, "F", r - 1, r + 1)] for r in range(num_ranks)]
    up = [[w for m in M for w in words(r, m, "B", r + 1, r - 1)] for r in range(num_ranks)]
    return "\\n".join(" ".join(a + b) for a, b in zip(down, up))
""",
    },
    "gpipe-3": {
        "the last rank leaves out what nobody uses": [
            (
                "        with torch.no_grad():\n            y = stage(kept[m])\n",
                "        if last:\n            continue\n"
                "        with torch.no_grad():\n            y = stage(kept[m])\n",
            ),
        ],
        "gradients by hand": """
def recompute_step(rank, world_size, stage, inputs, targets, num_microbatches, like):

    M, weights, kept = range(num_microbatches), list(stage.parameters()), {}
    for m in M:
        x = torch.empty_like(like) if rank else inputs[m]
        rank and comm.recv(x, rank - 1)
        kept[m] = x
        with torch.no_grad():
            y = stage(x)
        if rank + 1 < world_size:
            comm.send(y, rank + 1)
    for m in M:
        x = kept.pop(m).detach().requires_grad_()
        y = stage(x)
        if rank + 1 < world_size:
            comm.recv(dy := torch.empty_like(like), rank + 1)
        else:
            dy = 2 * (y.detach() - targets[m]) / y.numel() / num_microbatches
        dx, *grads = torch.autograd.grad(y, [x, *weights], dy)
        for weight, grad in zip(weights, grads):
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
        if rank:
            comm.send(dx, rank - 1)
""",
    },
    "gpipe-4": {
        "backwards first, by a loop": """
def by_urgency(p=4, m=8, room=3):
    rows, ends, free = [[] for _ in range(p)], {}, [0] * p

    def number(r, kind, t):  # how many of a rank's actions of a kind are over
        return sum(1 for (q, k, _), end in ends.items() if (q, k) == (r, kind) and end <= t)

    for t in range(99):
        for r in [r for r in range(p) if free[r] <= t]:
            f, b = (sum(1 for q, k, _ in ends if (q, k) == (r, kind)) for kind in "FB")
            can_b = b < number(*((r, "F") if r == p - 1 else (r + 1, "B")), t)
            can_f = f < (number(r - 1, "F", t) if r else m) and f - number(r, "B", t) < room
            if can_b or can_f:
                kind, i, ticks = ("B", b, 2) if can_b else ("F", f, 1)
                ends[r, kind, i] = free[r] = t + ticks
                rows[r].append(f"{r}{kind}{i}")
    return "\\n".join(" ".join(row) for row in rows)


rows = by_urgency()
""",
        "microbatches from the last to the first": [
            *[(f"{kind}{a}", f"{kind}_{7 - a}") for kind in "FB" for a in range(8)],
            ("_", ""),
        ],
    },
    "gpipe-5": {
        "a sum divided in the end": """
def accumulate(model, loss_fn, inputs, targets):
    rows, total = sum(map(len, inputs)), 0.0
    for x, y in zip(inputs, targets):
        if x.shape[0]:
            share = x.shape[0] / rows
            loss = loss_fn(model(x), y)
            loss.backward(torch.tensor(share, dtype=loss.dtype))
            total += share * float(loss)
    return total
""",
        "one backward of all losses": """
def accumulate(model, loss_fn, inputs, targets):
    pairs = [(x, y) for x, y in zip(inputs, targets) if len(x)]
    weights = torch.tensor([float(len(x)) for x, _ in pairs], dtype=torch.float64)
    losses = torch.stack([loss_fn(model(x), y) for x, y in pairs])
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    return loss.item()
""",
    },
}
