"""Right answers of another style to the exercises on DualPipe."""

RIGHT = {
    "dualpipe-6": {
        "DeepSeek's loops": """
def words(position, p, m):
    half, half_m = p // 2, m // 2
    found = []
    for _ in range((half - position - 1) * 2):
        found.append("F0")
    for _ in range(position + 1):
        found += "F0", "F1"
    for _ in range(half - position - 1):
        found += "I1", "W", "F1"
    for i in range(half_m - p + position + 1):
        if i == 0 and position == half - 1:
            found += "F0", "B1"
        else:
            found.append("F0&B1")
        found.append("F1&B0")
    for _ in range(half - position - 1):
        found += "B1", "F1&B0"
    for i in range(position + 1):
        for flow in (1, 0):
            late = 2 * i + (flow == 0) >= position + 1
            found.append(("I" if late else "B") + str(flow))
    for _ in range(half - position - 1):
        found += "W", "I0"
    return found + ["W" for _ in range(position + 1)]


def named(words, flows):
    done, row, left = {}, [], []
    for word in words:
        parts = []
        for half in word.split("&"):
            if half == "W":
                parts.append(left[0])
                del left[0]
                continue
            key = (half[0] == "F", half[1:])
            stage, first = flows[int(half[1:])]
            parts.append(f"{stage}{half[0]}{first + done.get(key, 0)}")
            done[key] = done.get(key, 0) + 1
            left += [parts[-1].replace("I", "W")] if half[0] == "I" else []
        row.append(parts[0] if len(parts) < 2 else "({};{})OVERLAP_F_B".format(*parts))
    return " ".join(row)


def dualpipe_rows(p, m):
    upper = [(named(words(r, p, m), ((r, 0), (p - 1 - r, m // 2)))) for r in range(p // 2)]
    lower = [named(words(r, p, m), ((r, m // 2), (p - 1 - r, 0))) for r in range(p // 2)]
    return upper + lower[::-1]


def dualpipe_place(p, m):
    def place(stage, microbatch):
        enters_at_the_last = 2 * microbatch >= m
        return abs((p - 1) * enters_at_the_last - stage)

    return place
""",
        "iterators that count": """
from itertools import chain, count, repeat


def words(position, p, m):
    between = range(p // 2 - 1 - position)
    text = "F0 F0 " * len(between) + "F0 F1 " * (position + 1) + "I1 W F1 " * len(between)
    pairs = "F0&B1 F1&B0 " * (m // 2 - p + position + 1)
    text += pairs if len(between) else pairs.replace("&", " ", 1)
    text += "B1 F1&B0 " * len(between)
    backwards = ("B1 B0 " * (position + 1)).split()
    middle = len(backwards) // 2
    text += " ".join(w if k < middle else "I" + w[1] for k, w in enumerate(backwards))
    return tuple((text + " W I0" * len(between) + " W" * (position + 1)).split())


class _Flow:
    def __init__(self, stage, first):
        self.stage, self.forward, self.backward = stage, count(first), count(first)

    def name(self, kind):
        return f"{self.stage}{kind}{next(self.forward if kind == 'F' else self.backward)}"


def named(words, flows):
    both = [_Flow(*flow) for flow in flows]
    inputs_only = []

    def say(word):
        if word == "W":
            return inputs_only.pop(0).replace("I", "W")
        said = both[int(word[1])].name(word[0])
        if "I" in said:
            inputs_only.append(said)
        return said

    return " ".join(
        "({};{})OVERLAP_F_B".format(*(say(half) for half in word.split("&"))) if "&" in word else say(word)
        for word in words
    )


def dualpipe_rows(p, m):
    rows = []
    for r in range(p):
        flows = [(r, 0), (p - 1 - r, m // 2)]
        nearer = sorted(flows, key=lambda flow: flow[0])
        rows.append(named(words(nearer[0][0], p, m), tuple(nearer)))
    return tuple(rows)


def dualpipe_place(p, m):
    where = {(s, i): s for s in range(p) for i in range(m // 2)}
    where |= {(s, i): p - 1 - s for s in range(p) for i in range(m // 2, m)}
    return lambda *key: where[key]
""",
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
}
