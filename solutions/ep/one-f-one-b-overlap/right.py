"""Right answers of another style to the exercises on the overlapped pair."""

RIGHT = {
    "one_f_one_b_overlap-5": {
        "a tape of generators": """
from collections import deque
from typing import NamedTuple

import torch

from mine.exchange import start_exchange


class Compute(NamedTuple):
    f: object


class Travel(NamedTuple):
    sizes: object


def _exchanged(x, sends, receives, ranks, tag):
    out, works = start_exchange(x, sends, receives, ranks, tag)
    yield
    [work.wait() for work in works]
    return out


def _computed_back(x, carry, y, made, dy, grads):
    total = 0
    for out, grad in [(y, dy)] + [(made[name], grads[name]) for name in grads]:
        if grad is not None and out.requires_grad:
            total = total + (out * grad).sum()
    if isinstance(total, torch.Tensor):
        total.backward()
    return x.grad, {name: value.grad for name, value in carry.items() if getattr(value, "requires_grad", False)}
    yield


def _travelled_back(sizes, dy, grads, tag):
    sends, receives, ranks = sizes
    dy = yield from _exchanged(dy, receives, sends, ranks, tag)
    return dy, grads


def _fresh(value):
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
        return value.detach().clone().requires_grad_()
    return value


def forward_of(steps, x, tag):
    carry, tape = {}, []
    for step in steps:
        if isinstance(step, Travel):
            sizes = step.sizes(carry)
            x = yield from _exchanged(x, *sizes, tag)
            tape.append((_travelled_back, sizes))
        else:
            x, carry = _fresh(x), {name: _fresh(value) for name, value in carry.items()}
            y, made = step.f(x, carry)
            tape.append((_computed_back, (x, carry, y, made)))
            x, carry = y.detach(), made
    return x, tape


def backward_of(steps, tape, dy, tag):
    grads = {}
    for back, kept in tape[::-1]:
        if back is _travelled_back:
            dy, grads = yield from back(kept, dy, grads, tag)
        else:
            dy, grads = yield from back(*kept, dy, grads)
    return dy


def take_turns(*generators):
    values, waiting = [None] * len(generators), deque(enumerate(generators))
    while waiting:
        number, generator = waiting.popleft()
        try:
            generator.send(None)
            waiting.append((number, generator))
        except StopIteration as end:
            values[number] = end.value
    return values
""",
        "recursion": """
from typing import NamedTuple, Any
import torch
import mine.exchange as exchange


class Compute(NamedTuple):
    f: Any


class Travel(NamedTuple):
    sizes: Any


def is_real(value):
    return torch.is_tensor(value) and value.is_floating_point()


def forward_of(steps, x, tag, carry=None):
    if not steps:
        return x, None
    step, *later = steps
    carry = carry or {}
    if type(step) is Travel:
        sends, receives, ranks = step.sizes(carry)
        x, works = exchange.start_exchange(x, sends, receives, ranks, tag)
        yield
        while works:
            works.pop().wait()
        y, rest = yield from forward_of(later, x, tag, carry)
        return y, ((sends, receives, ranks), rest)
    given = {"the rows": x, **carry}
    given = {name: v.detach().requires_grad_() if is_real(v) else v for name, v in given.items()}
    out, made = step.f(given["the rows"], {name: v for name, v in given.items() if name != "the rows"})
    y, rest = yield from forward_of(later, out.detach(), tag, made)
    return y, ((given, {"the rows": out, **made}), rest)


def _back(steps, saved, dy, tag):
    if not steps:
        return {"the rows": dy}
    grads = yield from _back(steps[1:], saved[1], dy, tag)
    if type(steps[0]) is Travel:
        sends, receives, ranks = saved[0]
        moved, works = exchange.start_exchange(grads.pop("the rows"), receives, sends, ranks, tag)
        yield
        while works:
            works.pop().wait()
        return {"the rows": moved, **grads}
    given, made = saved[0]
    known = [name for name in made if is_real(made[name]) and made[name].requires_grad and grads.get(name) is not None]
    torch.autograd.backward([made[name] for name in known], [grads[name] for name in known])
    return {name: v.grad for name, v in given.items() if is_real(v)}


def backward_of(steps, saved, dy, tag):
    grads = yield from _back(list(steps), saved, dy, tag)
    return grads.get("the rows")


def take_turns(*generators):
    results = {}
    while True:
        still = [g for g in generators if id(g) not in results]
        if not still:
            return [results[id(g)] for g in generators]
        for g in still:
            end = next(_ended(g), None)
            if end:
                results[id(g)] = end[0]


def _ended(g):
    try:
        next(g)
    except StopIteration as end:
        yield [end.value]
""",
    },
    "one_f_one_b_overlap-6": {
        "the backward first, and an MLP at the end": """
from mine import row_messages
from mine.block import attention, norm
from mine.execute import KINDS
from mine.later import SplitStage
from mine.moe import compute, plan, rows_of, sum_of
from mine.ring_attention import RingAttention
from mine.router import choose
from mine.steps import Compute, Travel, backward_of, forward_of, take_turns
from mine.tokens import mlp_between_cut_tokens


class PairedStage(SplitStage):
    def __init__(self, steps, parameters):
        self.parameters = list(parameters)
        self.there = lambda x: forward_of(steps, x, 1)
        self.back = lambda saved, dy: backward_of(steps, saved, dy, 2)

    def forward(self, x):
        return tuple(take_turns(self.there(x))[0])

    def backward(self, saved, dy):
        return take_turns(self.back(saved, dy))[0]

    def pair(self, x, other, saved, dy):
        dx, (y, kept) = take_turns(other.back(saved, dy), self.there(x))
        return y, kept, dx


class Layer:
    def __init__(self, w, heads, num_experts, route, ranks):
        self.w, self.heads, self.num_experts, self.route, self.ranks = w, heads, num_experts, route, ranks

    def attend(self, q, k, v):
        return RingAttention.apply(q, k, v, self.ranks)

    def begin(self, x, carry):
        w = self.w
        x = x + attention(norm(x, w["norm1"]), w, self.heads, self.attend)
        h = norm(x, w["norm2"])
        chosen, weights = choose(h, w["router"], w["bias"], *self.route)
        note = plan(chosen, self.num_experts, self.ranks)
        return rows_of(h, note), dict(x=x, h=h, weights=weights, note=note)

    def middle(self, rows, carry):
        return compute(rows, carry["note"], [*zip(self.w["gates"], self.w["ups"], self.w["downs"])]), carry

    def end(self, rows, carry):
        y = sum_of(rows, carry["weights"], carry["note"]) + carry["x"]
        return y + mlp_between_cut_tokens(carry["h"], self.w["up"], self.w["down"], self.ranks), {}

    def sizes(self, carry):
        return carry["note"].sends, carry["note"].receives, self.ranks

    def sizes_back(self, carry):
        sends, receives, ranks = self.sizes(carry)
        return receives, sends, ranks


def layer_steps(*args):
    layer = Layer(*args)
    works = [Compute(layer.begin), Compute(layer.middle), Compute(layer.end)]
    return [works[0], Travel(layer.sizes), works[1], Travel(layer.sizes_back), works[2]]


def both(run, token):
    (s, _, i), (t, _, j) = row_messages.actions(token)
    saved, dy = run.before_b(t, j)
    y, kept, dx = run.stages[s].pair(run.before_f(s, i), run.stages[t], saved, dy)
    run.after_b(t, j, dx)
    run.after_f(s, i, y, kept)


KINDS["OVERLAP_F_B"] = both
""",
        "its own turns": [
            (
                "(y, kept), dx = take_turns(forward_of(self.steps, x, FORWARD), "
                "backward_of(other.steps, saved, dy, BACKWARD))\n        return y, kept, dx",
                "ends = {}\n"
                "        under_way = {'F': forward_of(self.steps, x, FORWARD), "
                "'B': backward_of(other.steps, saved, dy, BACKWARD)}\n"
                "        while under_way:\n"
                "            for name in list(under_way):\n"
                "                try:\n"
                "                    next(under_way[name])\n"
                "                except StopIteration as end:\n"
                "                    ends[name] = end.value\n"
                "                    del under_way[name]\n"
                "        return (*ends['F'], ends['B'])",
            )
        ],
    },
    "one_f_one_b_overlap-3": {
        "M_W before the last attention": """rows = (
    "A_F0 M_B1 M_F0 A_B1 M_W1 A_F1 M_B0 M_F1 M_W0 A_B0 A_W0 A_W1",
    "C_B1 D_F0 D_B1 C_F0 C_B0 D_F1 D_B0 C_F1",
)""",
        "all W of attention at the end": """rows = [
    "A_F0 M_B1 M_F0 A_B1 M_W1 A_F1 M_B0 M_W0 M_F1 A_B0 A_W1 A_W0",
    "C_B1 D_F0 D_B1 C_F0 C_B0 D_F1 D_B0 C_F1",
]""",
    },
    "one_f_one_b_overlap-4": {
        "waits in the order of issue": """
def carry_out(program, do, issue, needs):
    handles, order = {}, []
    for op in program:
        if op.startswith(("D", "C")):
            handles[op] = issue(op)
            order.append(op)
        else:
            if needs.get(op) in order:
                for other in order[: order.index(needs[op]) + 1]:
                    handles[other].wait()
                order = order[order.index(needs[op]) + 1 :]
            do(op)
    for other in order:
        handles[other].wait()
""",
        "waits twice": """
def carry_out(program, do, issue, needs):
    handles = {}
    for op in program:
        if op[0] in {"C", "D"}:
            handles[op] = issue(op)
        else:
            handle = handles.get(needs.get(op))
            if handle is not None:
                handle.wait()
            do(op)
    [handle.wait() for handle in handles.values()]
""",
    },
}
