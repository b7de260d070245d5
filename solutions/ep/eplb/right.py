"""Right answers of another style to the exercises on EPLB."""

RIGHT = {
    "eplb-2": {
        "heaps": """
import heapq

def make_plan(loads, num_slots, num_ranks):
    heap = [(-load, expert, 1) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(loads)):
        _, expert, n = heapq.heappop(heap)
        heapq.heappush(heap, (-loads[expert] / (n + 1), expert, n + 1))
    shares = sorted((share, expert) for share, expert, n in heap for _ in range(n))
    ranks = [(0.0, rank, []) for rank in range(num_ranks)]
    heapq.heapify(ranks)
    full = []
    for share, expert in shares:
        total, rank, held = heapq.heappop(ranks)
        held.append(expert)
        if len(held) == num_slots // num_ranks:
            full.append(held)
        else:
            heapq.heappush(ranks, (total - share, rank, held))
    return sum(full, [])
""",
        "fractions, and the last of equals": """
from fractions import Fraction

def make_plan(loads, num_slots, num_ranks):
    n = {i: 1 for i in range(len(loads))}
    share = lambda i: Fraction(loads[i]) / n[i]
    for _ in range(num_slots - len(loads)):
        n[max(reversed(n), key=share)] += 1
    ranks = [[] for _ in range(num_ranks)]
    for i in sorted((i for i in n for _ in range(n[i])), key=share, reverse=True):
        room = [rank for rank in reversed(ranks) if len(rank) < num_slots // num_ranks]
        min(room, key=lambda rank: sum(map(share, rank))).append(i)
    return [i for rank in ranks for i in rank]
""",
    },
    "eplb-3": {
        "another slot for expert 0": "plan = [0, 6, 8, 4, 2, 3, 1, 8, 7, 0, 8, 5]",
        "as a tensor": "plan = torch.tensor([0, 6, 8, 4, 2, 3, 1, 8, 7, 8, 0, 5])",
    },
    "eplb-4": {
        "token by token": """
def slots_of(chosen, slots, counts):
    seen, found = [0] * len(counts), []
    for expert in chosen.tolist():
        found.append(int(slots[expert, seen[expert] % int(counts[expert])]))
        seen[expert] += 1
    return torch.tensor(found, dtype=torch.int64)
""",
        "blocks instead of turns": """
def slots_of(chosen, slots, counts):
    found = torch.empty_like(chosen)
    for expert, n in enumerate(counts.tolist()):
        mine = (chosen == expert).nonzero()[:, 0]
        for replica, part in enumerate(mine.tensor_split(n)):
            found[part] = slots[expert, replica]
    return found
""",
    },
}
