"""Right answers of another style to the exercises on layers of experts."""

RIGHT = {
    "smoe-5": {
        "a row says for which expert it is": """
import torch
import torch.nn.functional as F
from dualpipe_lab.comm import get_rank
from mine.column import linear
from mine.exchange import Exchange, start_exchange

class Plan:
    pass

def swap(x, sends, receives, ranks):
    out, works = start_exchange(x, sends, receives, ranks, 0)
    [work.wait() for work in works]
    return out

def plan(chosen, num_experts, ranks):
    made, N, ones = Plan(), len(ranks), [1] * len(ranks)
    made.owner = chosen.reshape(-1) * N // num_experts
    made.slots = torch.cat([torch.nonzero(made.owner == n)[:, 0] for n in range(N)])
    made.k = chosen.shape[1]
    made.sends = [int((made.owner == n).sum()) for n in range(N)]
    made.receives = swap(torch.tensor(made.sends), ones, ones, ranks).tolist()
    made.expert = swap(chosen.reshape(-1)[made.slots], made.sends, made.receives, ranks)
    made.first = ranks.index(get_rank()) * num_experts // N
    return made

def rows_of(x, plan):
    return x.repeat_interleave(plan.k, 0)[plan.slots]

def compute(rows, plan, experts):
    out = torch.zeros_like(rows)
    for number, (gate, up, down) in enumerate(experts):
        places = torch.nonzero(plan.expert == plan.first + number)[:, 0]
        mine = rows.index_select(0, places)
        out = out.index_put((places,), linear(F.silu(linear(mine, gate)) * linear(mine, up), down))
    return out

def sum_of(rows, weights, plan):
    by_slot = torch.zeros_like(rows).index_copy(0, plan.slots, rows)
    return (by_slot.view(*weights.shape, rows.shape[1]) * weights.unsqueeze(-1)).sum(1)

def moe(x, chosen, weights, experts, num_experts, ranks):
    made = plan(chosen, num_experts, ranks)
    sizes = made.sends, made.receives
    out = compute(Exchange.apply(rows_of(x, made), *sizes, ranks), made, experts)
    return sum_of(Exchange.apply(out, *sizes[::-1], ranks), weights, made)
""",
        "sorted, split, and sorted back; counts by messages": """
from types import SimpleNamespace

import torch
from dualpipe_lab import comm
from mine.column import linear
from mine.exchange import Exchange

def plan(chosen, num_experts, ranks):
    N, me = len(ranks), ranks.index(comm.get_rank())
    E = num_experts // N
    order = torch.sort(chosen.flatten(), stable=True).indices
    counts = torch.zeros(num_experts, dtype=torch.int64).index_add(0, chosen.flatten(), torch.ones_like(order))
    table, works = torch.zeros(N, E, dtype=torch.int64), []
    for n in range(N):
        mine = counts[n * E : n * E + E].clone()
        if n == me:
            table[n] = mine
        else:
            works += [comm.isend(mine, ranks[n], 0), comm.irecv(table[n], ranks[n], 0)]
    for work in works:
        work.wait()
    kinds = torch.cat([torch.full((int(n),), e) for row in table for e, n in enumerate(row)])
    major = torch.sort(kinds, stable=True).indices
    return SimpleNamespace(
        sends=[int(part.sum()) for part in counts.split(E)], receives=[int(row.sum()) for row in table],
        order=order, back=torch.argsort(order), major=major, minor=torch.argsort(major),
        sizes=table.sum(0).tolist(), token=torch.arange(len(chosen)).repeat_interleave(chosen.shape[1])[order],
    )

def rows_of(x, note):
    return torch.index_select(x, 0, note.token)

def compute(rows, note, experts):
    made = []
    for part, (gate, up, down) in zip(rows[note.major].split(note.sizes), experts):
        a = linear(part, gate)
        made.append(linear(a * a.sigmoid() * linear(part, up), down))
    return torch.cat(made)[note.minor]

def sum_of(rows, weights, note):
    return torch.einsum("tk,tkd->td", weights, rows[note.back].reshape(*weights.shape, rows.shape[-1]))

def moe(x, chosen, weights, experts, num_experts, ranks):
    note = plan(chosen, num_experts, ranks)
    there = Exchange.apply(rows_of(x, note), note.sends, note.receives, ranks)
    back = Exchange.apply(compute(there, note, experts), note.receives, note.sends, ranks)
    return sum_of(back, weights, note)
""",
    },
    "smoe-3": {
        "a row says for which expert it is": """
def layer(x, experts, weights, num_experts):
    share, top_k = len(weights), experts.shape[1]
    slots = experts.flatten()
    order = (slots // share).argsort(stable=True)
    sends = (slots // share).bincount(minlength=num_experts // share)
    receives = exchange_counts(sends[:, None])
    splits = Splits(tuple(sends.tolist()), tuple(receives.flatten().tolist()))
    own = all_to_all_rows_async(slots[order] % share, splits).wait()
    rows = all_to_all_rows_async(x[order // top_k], splits).wait()
    made = torch.stack([weights[e] @ row for e, row in zip(own, rows)]) if len(rows) else rows
    back = all_to_all_rows_async(made, splits.transposed).wait()
    return torch.zeros_like(x).index_add(0, order // top_k, back)
""",
        "one exchange per expert of a rank": """
def layer(x, experts, weights, num_experts):
    share, y = len(weights), torch.zeros_like(x)
    counts = experts.flatten().bincount(minlength=num_experts).view(-1, share)
    receives = exchange_counts(counts)
    for e, weight in enumerate(weights):
        tokens = [(experts == expert).any(1).nonzero()[:, 0] for expert in range(e, num_experts, share)]
        splits = Splits(tuple(map(len, tokens)), tuple(receives[:, e].tolist()))
        tokens = torch.cat(tokens)
        rows = all_to_all_rows_async(x[tokens], splits).wait() @ weight.T
        y.index_add_(0, tokens, all_to_all_rows_async(rows, splits.transposed).wait())
    return y
""",
    },
}
