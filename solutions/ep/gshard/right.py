"""Right answers of another style to the exercises on GShard."""

RIGHT = {
    "gshard-2": {
        "choice by choice": """
def assign(indices, num_experts, num_slots_each):
    used, slots = [0] * num_experts, torch.full_like(indices, -1)
    for k in range(indices.shape[1]):
        for t in range(indices.shape[0]):
            expert = int(indices[t, k])
            if used[expert] < num_slots_each:
                slots[t, k] = expert * num_slots_each + used[expert]
            used[expert] += 1
    return slots
""",
        "a stable sort": """
def assign(indices, num_experts, num_slots_each):
    line = indices.T.flatten()
    order = torch.sort(line, stable=True).indices
    counts = torch.bincount(line, minlength=num_experts)
    place = torch.arange(len(line)) - (counts.cumsum(0) - counts)[line[order]]
    slots = torch.empty_like(line)
    slots[order] = torch.where(place < num_slots_each, line[order] * num_slots_each + place, -1)
    return slots.reshape(indices.shape[::-1]).T
""",
    },
    "gshard-3": {
        "one exchange per expert of a rank": """
def to_experts(filled, num_slots_each):
    e, C, D = comm.get_world_size(), num_slots_each, filled.shape[1]
    even = Splits((C,) * e, (C,) * e)
    rows = [dispatch(part, even).view(e, C, D) for part in filled.split(e * C)]
    return torch.stack([part.transpose(0, 1).reshape(C * e, D) for part in rows])


def from_experts(made, num_slots_each):
    e, C = comm.get_world_size(), num_slots_each
    even = Splits((C,) * e, (C,) * e)
    by_rank = [rows.view(C, e, -1).transpose(0, 1).reshape(e * C, -1) for rows in made]
    return torch.cat([combine(rows, even) for rows in by_rank])
""",
        "with an index": """
def leaving(e, L, C):
    return torch.tensor([(own * e + r) * C + slot for r in range(e) for own in range(L) for slot in range(C)])


def places(e, L, C):
    return torch.tensor([(r * L + own) * C + slot for own in range(L) for slot in range(C) for r in range(e)])


def to_experts(filled, num_slots_each):
    e = comm.get_world_size()
    L = len(filled) // num_slots_each // e
    rows = filled[leaving(e, L, num_slots_each)]
    rows = dispatch(rows, Splits((L * num_slots_each,) * e, (L * num_slots_each,) * e))
    return rows[places(e, L, num_slots_each)].reshape(L, e * num_slots_each, -1)


def from_experts(made, num_slots_each):
    e, L = comm.get_world_size(), len(made)
    back = made.flatten(0, 1)[places(e, L, num_slots_each).argsort()]
    back = dispatch(back, Splits((L * num_slots_each,) * e, (L * num_slots_each,) * e))
    return back[leaving(e, L, num_slots_each).argsort()]
""",
    },
    "gshard-4": {
        "softmax of the chosen": """
def weights_of(logits, indices, slots):
    return torch.where(slots >= 0, logits.gather(-1, indices).softmax(-1), 0.0)
""",
        "normalize": """
def weights_of(logits, indices, slots):
    scores = torch.take_along_dim(torch.softmax(logits, dim=1), indices, dim=1)
    return torch.nn.functional.normalize(scores, p=1, dim=1).masked_fill(slots.lt(0), 0)
""",
    },
}
