"""Right answers of another style to the exercises on EPLB."""

RIGHT = {
    "eplb-2": {
        "heaps": """
import heapq

def make_plan(loads, num_slots, speeds, most):
    heap, done = [(-load, expert, 1) for expert, load in enumerate(loads)], []
    heapq.heapify(heap)
    spare = num_slots - len(loads)
    while heap:
        share, expert, n = heapq.heappop(heap)
        if n == most or spare == 0:
            done.append((share, expert, n))
        else:
            spare -= 1
            heapq.heappush(heap, (-loads[expert] / (n + 1), expert, n + 1))
    shares = sorted((share, expert) for share, expert, n in done for _ in range(n))
    size = num_slots // len(speeds)
    plan, used, tokens = [-1] * num_slots, [0] * len(speeds), [0.0] * len(speeds)
    for share, expert in shares:
        end, rank = min(
            ((tokens[r] - share) / speed, r) for r, speed in enumerate(speeds) if used[r] < size
        )
        plan[rank * size + used[rank]] = expert
        used[rank] += 1
        tokens[rank] -= share
    return plan
""",
        "fractions, and the last of equals": """
from fractions import Fraction

def make_plan(loads, num_slots, speeds, most):
    n = {i: 1 for i in range(len(loads))}
    share = lambda i: Fraction(loads[i]) / n[i]
    for _ in range(num_slots - len(loads)):
        allowed = [i for i in reversed(n) if n[i] < most]
        if not allowed:
            break
        n[max(allowed, key=share)] += 1
    size = num_slots // len(speeds)
    ranks = [(Fraction(speed), []) for speed in speeds]
    for i in sorted((i for i in n for _ in range(n[i])), key=share, reverse=True):
        room = [rank for rank in reversed(ranks) if len(rank[1]) < size]
        min(room, key=lambda rank: (sum(map(share, rank[1])) + share(i)) / rank[0])[1].append(i)
    for _, rank in ranks:
        rank.extend([-1] * (size - len(rank)))
    return [i for _, rank in ranks for i in rank]
""",
    },
}
