"""Right answers of another style to the exercises on DualPipe."""

RIGHT = {
    "dualpipe-2": {
        "without a Row": """
def one_row(rank, num_ranks, num_microbatches, cut, room):
    if cut:
        flows = ((rank, 0), (2 * num_ranks - 1 - rank, 0))
        n, m, at = num_ranks, num_microbatches, rank
    else:
        n, m, other = num_ranks // 2, num_microbatches // 2, num_ranks - 1 - rank
        flows = ((rank, 0), (other, m)) if rank < n else ((other, m), (rank, 0))
        at = min(rank, other)
    count = {(kind, flow): 0 for kind in "FB" for flow in (0, 1)}
    words, due = [], []

    def word(kind, flow):
        key = ("F" if kind == "F" else "B", flow)
        count[key] += 1
        return f"{flows[flow][0]}{kind}{flows[flow][1] + count[key] - 1}"

    def run(text):
        for each in text.split():
            if each == "W":
                words.append(due.pop(0))
            elif "&" in each:
                f, b = each.split("&")
                words.append(f"({word('F', int(f))};{word('B', int(b))})OVERLAP_F_B")
            else:
                words.append(word(each[0], int(each[1])))
                if each[0] == "I":
                    due.append(words[-1].replace("I", "W"))

    inside, outside = n - 1 - at, at + 1
    late = min(room, outside)
    run("F0 " * 2 * inside + "F0 F1 " * outside + ("I1 W F1 " if room else "B1 F1 ") * inside)
    pairs = m - 2 * n + outside
    run("F0 B1 1&0 " + "0&1 1&0 " * (pairs - 1) if inside == 0 else "0&1 1&0 " * pairs)
    run("B1 1&0 " * inside)
    run(" ".join(("B" if i + late < 2 * outside else "I") + "10"[i % 2] for i in range(2 * outside)))
    run((" W I0" if room else " B0") * inside + " W" * late)
    return " ".join(words)
""",
        "room made afterwards": """
def one_row(rank, num_ranks, num_microbatches, cut, room):
    n, m = (num_ranks, num_microbatches) if cut else (num_ranks // 2, num_microbatches // 2)
    mirror = (2 * num_ranks if cut else num_ranks) - 1 - rank
    flows = [(rank, 0), (mirror, 0 if cut else m)]
    at = min(rank, mirror)
    row = Row(*(flows if rank < mirror else flows[::-1]))
    inside, outside = n - 1 - at, at + 1
    words = ["F0"] * 2 * inside + ["F0", "F1"] * outside + ["I1", "W", "F1"] * inside
    pairs = ["P01", "P10"] * (m - 2 * n + outside)
    words += pairs if inside else ["F0", "B1", *pairs[1:]]
    words += ["B1", "P10"] * inside
    ends = ["B1", "B0"] * outside
    words += ends[:outside] + ["J" + word[1] for word in ends[outside:]] + ["W", "I0"] * inside + ["W"] * outside
    spare = outside - min(room, outside)
    for word in words:
        if word == "W":
            if row.waiting:
                row.W()
        elif word[0] == "P":
            row.pair(int(word[1]), int(word[2]))
        else:
            whole = word[0] == "B" or word[0] in "IJ" and (room == 0 or word[0] == "J" and spare > 0)
            spare -= word[0] == "J"
            getattr(row, "F" if word[0] == "F" else "B" if whole else "I")(int(word[1]))
    return " ".join(row.steps)
""",
    },
    "dualpipe-3": {
        "B where W follows at once": [("0I1 0W1", "0B1"), ("0I2 0W2", "0B2")],
        "one text of two lines": [
            ("upper = [\n", "upper = '''\n"),
            ('    "', ""),
            ('",\n', "\n"),
            ("\n]", "\n'''"),
        ],
    },
    "dualpipe-4": {
        "functions that keep what they need": """
from collections import deque
from functools import partial


def backwards(words, weights, grads, inputs, dys):
    feeds = [iter(list(zip(inputs[f], dys[f]))) for f in (0, 1)]
    queue, out = deque(), []
    for word in words:
        if word == "W":
            queue.popleft()()
        else:
            flow = int(word[-1])
            x, dy = next(feeds[flow])
            out.append(torch.mm(dy, weights[flow]))
            add = partial(grads[flow].addmm_, dy.T, x)
            queue.append(add) if word[0] == "I" else add()
    return out
""",
        "numbers of what waits": """
def backwards(words, weights, grads, inputs, dys):
    history = [word for word in words if word != "W"]
    flows = [int(word[1]) for word in history]
    names = [(flow, flows[:k].count(flow)) for k, flow in enumerate(flows)]
    oldest = [name for name, w in zip(names, history) if w[0] == "I"]
    due = [name for name, w in zip(names, history) if w[0] == "B"] + oldest[: list(words).count("W")]
    for f, i in due:
        grads[f] += dys[f][i].T @ inputs[f][i]
    return [dys[f][i] @ weights[f] for f, i in names]
""",
    },
    "dualpipe-5": {
        "gradients as one tensor": """
def clipped_step(rank, world_size, stages, max_norm, lr):
    mirror = world_size - 1 - rank
    groups = {r: comm.new_group([r, world_size - 1 - r]) for r in range(world_size // 2)}
    flat = {s: torch.cat([w.grad.reshape(-1) for w in stages[s].parameters()]) for s in sorted(stages)}
    both = torch.cat(list(flat.values()))
    comm.all_reduce(both, group=groups[min(rank, mirror)])
    parts = dict(zip(flat, both.split([part.numel() for part in flat.values()])))
    half = sum(part @ part for part in parts.values()) / 2
    comm.all_reduce(half)
    norm = half.sqrt().item()
    factor = lr * (max_norm / norm if norm > max_norm else 1.0)
    with torch.no_grad():
        for s, part in parts.items():
            sizes = [w.numel() for w in stages[s].parameters()]
            for w, g in zip(stages[s].parameters(), part.split(sizes)):
                w -= factor * g.view_as(w)
    return norm
""",
        "the norm by the upper half of the ranks": [
            (
                "    for w in stages[rank].parameters():  # every stage once\n"
                "        squares += w.grad.square().sum()\n",
                "    for module in stages.values() if rank < world_size // 2 else ():\n"
                "        for w in module.parameters():\n            squares += w.grad.norm() ** 2\n",
            )
        ],
    },
}
