"""Right answers of another style to the exercises on Zero Bubble."""

RIGHT = {
    "zero_bubble-5": {
        "a hook that is an object, W that are calls": """
from functools import partial

from mine.column import HOOKS
from mine.execute import KINDS
from mine.stage import Stage


def add(weight, x, dy):
    product = (x.T @ dy).T
    if weight.grad is not None:
        product = product + weight.grad
    weight.grad = product


class now_or_later:
    def __init__(self, left):
        self.left = left

    def __call__(self, weight, x, dy):
        if weight.grad_fn is not None:
            raise ValueError("no leaf")
        self.left.append(partial(add, weight, x.detach(), dy.detach()))


class SplitStage(Stage):
    def input_grad(self, saved, dy):
        queue, usual = [], HOOKS.pop("weight_grad")
        HOOKS.update(weight_grad=now_or_later(queue))
        try:
            dx = self.backward(saved, dy)
        finally:
            HOOKS["weight_grad"] = usual
        return dx, queue

    def weight_grads(self, left):
        while left:
            left.pop()()


def half(letter):
    def run_half(run, token):
        stage, i = map(int, token.split(letter))
        if letter == "I":
            dx, run.saved[stage, "W", i] = run.stages[stage].input_grad(*run.before_b(stage, i))
            run.after_b(stage, i, dx)
        else:
            run.stages[stage].weight_grads(run.saved.pop((stage, "W", i)))

    return run_half


for letter in "IW":
    KINDS[letter] = half(letter)
""",
        "in place, by a dictionary of weights": [
            ("left.append((weight, x, dy))", "left.append((weight, x.clone(), dy.clone()))"),
            (
                "        for weight, x, dy in left:\n            grad = dy.t() @ x\n"
                "            weight.grad = grad if weight.grad is None else weight.grad + grad\n",
                "        for weight, x, dy in reversed(left):\n            if weight.grad is None:\n"
                "                weight.grad = weight.detach() * 0\n            weight.grad.addmm_(dy.mT, x)\n",
            ),
        ],
    },
    "zero_bubble-6": {
        "a queue of what is due": """
from collections import deque


def zb_h1_rows(p, m):
    def row(s):
        due, forwards = deque(), iter(range(m))
        for i, _ in zip(forwards, range(p - 1 - s)):
            yield f"{s}F{i}"
        started = min(p - 1 - s, m)
        for i in range(m):
            if started < m:
                yield f"{s}F{started}"
                started += 1
            yield f"{s}I{i}"
            due.append(i)
            if len(due) > s:
                yield f"{s}W{due.popleft()}"
        while due:
            yield f"{s}W{due.popleft()}"

    return [" ".join(row(s)) for s in range(p)]
""",
        "made of 1F1B's": """
from mine.rows_1f1b import one_f_one_b_rows


def zb_h1_rows(p, m):
    rows = []
    for s, plain in enumerate(one_f_one_b_rows(p, m)):
        row = plain.replace("B", "I").split()
        for i in range(m):
            place = row.index(f"{s}I{i + s}") if i + s < m else len(row) - 1
            row.insert(place + 1, f"{s}W{i}")
        rows.append(" ".join(row))
    return rows
""",
    },
    "zero_bubble-4": {
        "backward with inputs": """
def follow(stage, row, inputs, dys):
    runs, arrived, out = {}, {}, []
    for word in row.split():
        m = int(word[1:])
        if word.startswith("F"):
            x = inputs[m].clone().detach().requires_grad_(True)
            runs[m] = (x, stage(x))
        elif word.startswith("I"):
            x, y = runs[m]
            y.backward(dys[m], inputs=[x], retain_graph=True)
            arrived[m] = dys[m]
            out.append(x.grad)
        elif m in arrived:
            runs.pop(m)[1].backward(arrived.pop(m), inputs=list(stage.parameters()))
        else:
            raise ValueError(f"W{m} has nothing to work with")
    return out
""",
        "what is due is a function": [
            (
                "due[m] = dys[m]\n            sent += torch.autograd.grad(y, x, due[m], retain_graph=True)",
                "due[m] = lambda y=y, dy=dys[m]: torch.autograd.grad(y, parameters, dy)\n"
                "            sent.append(torch.autograd.grad([y], [x], [dys[m]], retain_graph=True)[0])",
            ),
            (
                "            _, y = graphs.pop(m)\n"
                "            grads = torch.autograd.grad(y, parameters, due.pop(m))\n",
                "            grads = due.pop(m)()\n",
            ),
        ],
    },
}
