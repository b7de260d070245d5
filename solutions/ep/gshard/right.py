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
}
