"""Right answers of another style to the exercises on GPipe."""

RIGHT = {
    "gpipe-6": {
        "word by word": """
def gpipe_rows(p, m):
    rows = []
    for s in range(p):
        row = ""
        for k in ("F", "B"):
            for i in range(m):
                row += f" {s}{k}{i}"
        rows.append(row.strip())
    return rows


gpipe_place = lambda stage, microbatch: stage
""",
        "the last gradient first": [
            (
                '" ".join(f"{stage}{kind}{i}" for kind in "FB" for i in range(m))',
                '" ".join([f"{stage}F{i}" for i in range(m)] + [f"{stage}B{i}" for i in range(m)[::-1]])',
            )
        ],
    },
    "gpipe-7": {
        "one helper, four kinds": [
            (
                """    found: list[str] = []
    for token in row.split():
        before, after = [], []
        for stage, kind, i in actions(token):
            if kind == "W":  # adds to weights that are here
                continue
            way, source, target = ("F", stage - 1, stage + 1) if kind == "F" else ("B", stage + 1, stage - 1)
            if 0 <= source < num_stages and place(source, i) != me:
                before.append(f"{stage}RECV_{way}{i}")
            if 0 <= target < num_stages and place(target, i) != me:
                after.append(f"{stage}SEND_{way}{i}")
        found += [*before, token, *after]
    return " ".join(found)
""",
                """    def elsewhere(stage, i):
        return stage in range(num_stages) and place(stage, i) != me

    def messages(token, name, step):
        for stage, kind, i in reversed(actions(token)):
            if kind in ("F", "B", "I") and elsewhere(stage + (step if kind == "F" else -step), i):
                yield f"{stage}{name}_{'F' if kind == 'F' else 'B'}{i}"

    return " ".join(
        word for token in row.split() for word in (*messages(token, "RECV", -1), token, *messages(token, "SEND", 1))
    )
""",
            )
        ],
        "a table of ways": [
            (
                'way, source, target = ("F", stage - 1, stage + 1) if kind == "F" else ("B", stage + 1, stage - 1)',
                'way = {"F": "F", "B": "B", "I": "B"}[kind]\n            step = {"F": 1, "B": -1}[way]\n'
                "            source, target = stage - step, stage + step",
            ),
            ("if 0 <= source < num_stages and", "if source not in (-1, num_stages) and"),
            ("found += [*before, token, *after]", "found.extend(before + [token] + after[::-1])"),
        ],
    },
    "gpipe-8": {
        "gradients by autograd.grad": """
import torch


class Stage:
    def __init__(self, f, parameters):
        self.f = f
        self.parameters = tuple(parameters)

    def forward(self, x):
        leaf = x.clone().detach()
        if torch.is_floating_point(leaf):
            leaf.requires_grad = True
        with torch.enable_grad():
            out = self.f(leaf)
        return out.data, {"in": leaf, "out": out}

    def backward(self, saved, dy):
        x, y = saved["in"], saved["out"]
        wanted = [*self.parameters, *([x] if x.requires_grad else [])]
        grads = torch.autograd.grad([y], wanted, [dy], allow_unused=True)
        for weight, grad in zip(self.parameters, grads):
            if grad is not None:
                weight.grad = grad if weight.grad is None else weight.grad + grad
        return grads[-1] if x.requires_grad else None
""",
        "a function that goes back": [
            ("return y.detach(), (x, y)", "return y.detach(), partial(_back, x, y)"),
            (
                "class Stage:",
                "def _back(x, y, dy):\n    y.backward(dy)\n    return x.grad\n\n\nclass Stage:",
            ),
            ("from typing", "from functools import partial\nfrom typing"),
            (
                "x, y = saved\n        torch.autograd.backward(y, dy)  # starts the chain rule in the middle\n        ",
                "",
            ),
            ("return x.grad if x.is_floating_point() else None", "return saved(dy)"),
        ],
    },
    "gpipe-9": {
        "sends and receives by tables": [
            (
                """    way = kind[-1]
    target = stage + 1 if way == "F" else stage - 1
    x = run.leaving.pop((way, target, i))
    run.works[way, stage, i] = send_tensor(x, run.peers(target, i), run.tag(way, target, i))
""",
                """    key = (kind[-1], stage + {"F": 1, "B": -1}[kind[-1]], i)
    started = send_tensor(run.leaving[key], run.peers(*key[1:]), run.tag(*key))
    del run.leaving[key]
    run.works.setdefault(("sent", *key), []).extend(started)
""",
            ),
            (
                """    for work in run.works.pop(("F", stage, i), []) if way == "B" else []:
        work.wait()
""",
                """    if way == "B":
        for work in run.works.pop(("sent", "F", stage + 1, i)):
            work.wait()
""",
            ),
            (
                """    for works in run.works.values():
        for work in works:
            work.wait()
    return run.losses
""",
                """    while run.works:
        _, works = run.works.popitem()
        [work.wait() for work in works]
    return dict(run.losses)
""",
            ),
        ],
        "kinds that are objects": [
            (
                """def run_b(run: Run, token: str) -> None:
    \"\"\"A whole backward.\"\"\"
    ### BEGIN SOLUTION
    ((stage, _, i),) = actions(token)
    run.after_b(stage, i, run.stages[stage].backward(*run.before_b(stage, i)))
    ### END SOLUTION
""",
                """class Backward:
    def __call__(self, run, token):
        stage, _, number = actions(token)[0]
        kept, dy = run.before_b(stage, number)
        dx = run.stages[stage].backward(kept, dy)
        run.after_b(stage, number, dx)


run_b = Backward()
""",
            ),
            (
                """        if kind_of(token) not in KINDS:
            raise ValueError(f"no word {kind_of(token)} in {token}; known are {', '.join(KINDS)}")
        KINDS[kind_of(token)](run, token)
""",
                """        try:
            step = KINDS[kind_of(token)]
        except KeyError:
            raise KeyError(token, sorted(KINDS)) from None
        step(run, token)
""",
            ),
        ],
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
