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
