"""Right answers of another style to the exercises on one model on every cut."""

RIGHT = {
    "cuts-5": {
        "one sum for each leaf": """
import re

import torch


def holders(rows):
    by_stage = {}
    for position, row in enumerate(rows):
        for stage in set(map(int, re.findall(r"([0-9]+)[FBIW]", row))):
            by_stage[stage] = [*by_stage.get(stage, []), position]
    return by_stage


def own(x, learns=True):
    return x.detach().clone().requires_grad_(learns)


def part_of(w, member, size):
    def piece(name, x):
        if isinstance(x, list):
            first, end = (len(x) * one // size for one in (member, member + 1))
            return [own(one) for one in x[first:end]]
        if name == "up":
            x = x.unflatten(0, (size, -1))[member]
        if name == "down":
            x = x.unflatten(1, (size, -1))[:, member]
        return own(x, name != "bias")

    return {name: piece(name, x) for name, x in w.items()}


def sums(ws, positions, member, size):
    found = []
    for w in ws:
        for name in sorted(set(w) - {"bias"}):
            whole = [p * size + m for p in positions for m in range(size)]
            mirrors = whole[member::size]
            for leaf in w[name] if isinstance(w[name], (list, tuple)) else [w[name]]:
                found.append(([leaf], mirrors if name in ("up", "down", "gates", "ups", "downs") else whole))
    return found
""",
        "tables first": """
from collections import defaultdict

from mine import row_messages

HOW = dict.fromkeys(["gates", "ups", "downs"], "list") | {"up": 0, "down": 1}


def holders(rows):
    words = [(position, word) for position, row in enumerate(rows) for word in row.split()]
    pairs = sorted({(one[0], position) for position, word in words for one in row_messages.actions(word)})
    table = defaultdict(list)
    for stage, position in pairs:
        table[stage].append(position)
    return dict(table)


def part_of(w, member, size):
    part = {}
    for name in w:
        how = HOW.get(name)
        if how == "list":
            step = len(w[name]) // size
            part[name] = tuple(e.clone().detach().requires_grad_(True) for e in w[name][step * member :][:step])
        elif how is None:
            part[name] = w[name].clone().detach().requires_grad_(name != "bias")
        else:
            wide = w[name].shape[how] // size
            part[name] = w[name].narrow(how, member * wide, wide).clone().detach().requires_grad_(True)
    return part


def sums(ws, positions, member, size):
    both = {True: [], False: []}
    for w in ws:
        for name, value in w.items():
            if name != "bias":
                both[name in HOW] += [value] if not isinstance(value, (tuple, list)) else value
    mirrors = [member + size * one for one in positions]
    everybody = sorted(one - member + other for one in mirrors for other in range(size))
    return [(both[True], mirrors), (both[False], everybody)]
""",
    },
    "cuts-6": {
        "table and head as steps, leaves by their ranks": """
import torch
from torch.nn.functional import cross_entropy

from dualpipe_lab.comm import get_rank, get_world_size
from mine import block, execute, held, pair, ring, row_messages, steps, zero1


class Trainer:
    def __init__(self, layers, rows, place, num_stages, size, heads, route, lr):
        rank = get_rank()
        position, self.member, self.size, self.place = rank // size, rank % size, size, place
        self.num_stages, self.row = num_stages, row_messages.with_messages(rows[position], position, place, num_stages)
        group = list(range(position * size, position * size + size))
        self.held, self.stages, by_ranks = {}, {}, {}
        for stage, positions in sorted(held.holders(rows).items()):
            if position in positions:
                many = len(layers) // num_stages
                full = [layers[stage * many + one] for one in range(many)]
                self.held[stage] = [held.part_of(w, rank % size, size) for w in full]
                found = []
                for w, whole in zip(self.held[stage], full):
                    if "embed" in w:
                        found.append(steps.Compute(lambda ids, carry, w=w: (w["embed"][ids], carry)))
                    found += pair.layer_steps(w, heads, len(whole["gates"]), route, group)
                    if "head" in w:
                        found.append(
                            steps.Compute(lambda x, carry, w=w: (block.norm(x, w["norm3"]) @ w["head"].t(), carry))
                        )
                self.stages[stage] = pair.PairedStage(found, [])
                for leaves, ranks in held.sums(self.held[stage], positions, rank % size, size):
                    by_ranks.setdefault(tuple(ranks), []).extend(leaves)
        self.adams = [zero1.ShardedAdam(leaves, list(ranks), lr) for ranks, leaves in by_ranks.items()]

    def step(self, ids, targets):
        for stage in self.stages:
            for leaves, _ in held.sums(self.held[stage], [0], 0, self.size):
                for leaf in leaves:
                    leaf.grad = None
        here = ids.shape[1] // self.size
        mine = slice(self.member * here, self.member * here + here)
        total = int((targets != -100).sum())

        def loss(y, i):
            return cross_entropy(y, targets[i, mine], ignore_index=-100, reduction="sum") / total

        losses = execute.execute(
            self.row,
            self.stages,
            lambda stage, i: self.member + self.size * self.place(stage, i),
            self.num_stages,
            [one[mine] for one in ids],
            loss,
        )
        for adam in self.adams:
            adam.step()
        result = torch.tensor([float(sum(losses.values()))], dtype=torch.float64)
        ring.all_reduce(result, list(range(get_world_size())))
        return result.item()
""",
        "a class for a stage, shares gathered": """
import torch

from dualpipe_lab.comm import get_rank, get_world_size
from mine.block import norm
from mine.column import linear
from mine.data import num_tokens, share_of_loss
from mine.execute import execute
from mine.held import holders, part_of, sums
from mine.pair import PairedStage, layer_steps
from mine.ring import all_gather
from mine.row_messages import with_messages
from mine.steps import Compute
from mine.zero1 import ShardedAdam


class Model(PairedStage):
    def __init__(self, layers, positions, me, size, heads, route, lr):
        position, member = divmod(me, size)
        self.weights = [part_of(w, member, size) for w in layers]
        group = [position * size + one for one in range(size)]
        steps = []
        for w, full in zip(self.weights, layers):
            steps.extend(layer_steps(w, heads, len(full["gates"]), route, group))
        if "embed" in self.weights[0]:
            after_table = steps[0].f
            table = self.weights[0]["embed"]
            steps[0] = Compute(lambda ids, carry: after_table(torch.nn.functional.embedding(ids, table), carry))
        if "head" in self.weights[-1]:
            steps.append(Compute(self.logits))
        everything = sums(self.weights, positions, member, size)
        super().__init__(steps, [leaf for leaves, _ in everything for leaf in leaves])
        self.adams = [ShardedAdam(leaves, ranks, lr) for leaves, ranks in reversed(everything)]

    def logits(self, x, carry):
        return linear(norm(x, self.weights[-1]["norm3"]), self.weights[-1]["head"]), carry


class Trainer:
    def __init__(self, layers, rows, place, num_stages, size, heads, route, lr):
        me = get_rank()
        of = [layers[len(layers) * s // num_stages : len(layers) * (s + 1) // num_stages] for s in range(num_stages)]
        self.stages = {
            stage: Model(of[stage], positions, me, size, heads, route, lr)
            for stage, positions in holders(rows).items()
            if me // size in positions
        }
        self.known = rows, place, num_stages, size

    @property
    def held(self):
        return {number: stage.weights for number, stage in self.stages.items()}

    def step(self, ids, targets):
        rows, place, num_stages, size = self.known
        position, member = divmod(get_rank(), size)
        for stage in self.stages.values():
            for leaf in stage.parameters:
                leaf.grad = None
        parts = torch.stack([ids, targets]).tensor_split(size, dim=2)[member]
        total = num_tokens(targets, [get_rank()])
        shares = execute(
            with_messages(rows[position], position, place, num_stages),
            self.stages,
            lambda stage, i: place(stage, i) * size + member,
            num_stages,
            parts[0],
            lambda y, i: share_of_loss(y, parts[1, i], total),
        )
        for number in sorted(self.stages):
            for adam in self.stages[number].adams:
                adam.step()
        own = torch.zeros(1, dtype=torch.float64)
        for share in shares.values():
            own += share
        return all_gather(own, list(range(get_world_size()))).sum().item()
""",
    },
    "cuts-4": {
        "by the library's grid": """
def share(rank, axes, batch, num_microbatches, length):
    here = lab.Topology(axes).at(rank).coordinates
    dp, cp = dict(axes).get("dp", 1), dict(axes).get("cp", 1)
    mine = [number for number in range(batch) if number * dp // batch == here.get("dp", 0)]
    each, span = len(mine) // num_microbatches, length // cp
    start = here.get("cp", 0) * span
    return [mine[i : i + each] for i in range(0, len(mine), each)], range(start, start + span)
""",
        "digits from the right": """
def share(rank, axes, batch, num_microbatches, length):
    digits = {}
    for name, size in axes[::-1]:
        rank, digits[name] = divmod(rank, size)

    def piece(count, name):
        size, at = dict(axes).get(name, 1), digits.get(name, 0)
        return list(range(count * at // size, count * (at + 1) // size))

    mine = piece(batch, "dp")
    each = len(mine) // num_microbatches
    return tuple(tuple(mine[i * each : (i + 1) * each]) for i in range(num_microbatches)), piece(length, "cp")
""",
    },
}
