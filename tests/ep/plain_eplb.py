"""The greedy plan, one item after another: what the vectorised one is compared with, in tests and in the benchmark."""


def pack(loads, num_packs):
    """Each item, heaviest first, to the lightest pack that has room; return (pack, place) by item."""
    room = len(loads) // num_packs
    if room == 1:
        return [(item, 0) for item in range(len(loads))]
    packs, totals, found = [[] for _ in range(num_packs)], [0.0] * num_packs, {}
    for item in sorted(range(len(loads)), key=lambda i: -loads[i]):
        pack = min((p for p in range(num_packs) if len(packs[p]) < room), key=totals.__getitem__)
        found[item] = pack, len(packs[pack])
        packs[pack].append(item)
        totals[pack] += loads[item]
    return [found[item] for item in range(len(loads))]


def replicate(loads, num_replicas):
    """The expert of every replica, and the counts."""
    experts, counts = list(range(len(loads))), [1] * len(loads)
    while len(experts) < num_replicas:
        heaviest = max(range(len(loads)), key=lambda e: loads[e] / counts[e])
        experts.append(heaviest)
        counts[heaviest] += 1
    return experts, counts


def plan(loads, num_replicas, num_groups, num_nodes, num_ranks):
    """The expert in every slot of one layer."""
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    size = len(loads) // num_groups
    groups = pack([sum(loads[g * size : (g + 1) * size]) for g in range(num_groups)], num_nodes)
    ranks, slots = num_ranks // num_nodes, num_replicas // num_ranks
    found = [None] * num_replicas
    for node in range(num_nodes):
        own = sorted((place, group) for group, (n, place) in enumerate(groups) if n == node)
        experts = [group * size + i for _, group in own for i in range(size)]
        replicas, counts = replicate([loads[e] for e in experts], num_replicas // num_nodes)
        shares = [loads[experts[e]] / counts[e] for e in replicas]
        for replica, (rank, place) in zip(replicas, pack(shares, ranks), strict=True):
            found[node * ranks * slots + rank * slots + place] = experts[replica]
    return found
