"""Right answers of another style to the exercises on failures."""

RIGHT = {
    "failures-2": {
        "no index, a save is there when all shards are": """
def save(storage, host, num_hosts, step, shard):
    for name in (f"shard {step} {host}", f"part {host}"):
        storage.remove(name)
    yield
    storage.write(f"part {host}", shard)
    yield
    storage.rename(f"part {host}", f"shard {step} {host}")
    yield
    for name in storage.names():
        kind, *numbers = name.split()
        if kind == "shard" and int(numbers[0]) < step and int(numbers[1]) == host:
            storage.remove(name)

def load(storage, num_hosts):
    names = set(storage.names())
    steps = sorted({int(name.split()[1]) for name in names if name.startswith("shard")}, reverse=True)
    for step in steps:
        wanted = [f"shard {step} {host}" for host in range(num_hosts)]
        if names.issuperset(wanted):
            return step, [storage.read(name) for name in wanted]
    return None
""",
        "two places in turn": """
def save(storage, host, num_hosts, step, shard):
    place = "b" if "a" in current(storage) else "a"
    yield
    storage.write(f"{place}{host}", shard)
    yield
    if host == num_hosts - 1:
        storage.write(".latest", f"{place} {step}".encode())
        storage.rename(".latest", "latest")
    yield

def current(storage):
    return storage.read("latest").decode() if "latest" in storage.names() else ""

def load(storage, num_hosts):
    if not current(storage):
        return None
    place, step = current(storage).split()
    return int(step), [storage.read(f"{place}{host}") for host in range(num_hosts)]
""",
    },
    "failures-3": {
        "beats that were seen first": """
def silent(looks, ranks, limit):
    first_seen = {rank: (looks[0][0], None) for rank in ranks}
    answer = []
    for now, beats in looks:
        for rank, (number, _) in beats.items():
            if first_seen[rank][1] != number:
                first_seen[rank] = now, number
        answer.append({rank for rank in ranks if first_seen[rank][0] + limit < now})
    return answer
""",
        "backwards from each look": """
def silent(looks, ranks, limit):
    found = []
    for last, (now, beats) in enumerate(looks):
        here = []
        for rank in ranks:
            number = beats[rank][0] if rank in beats else 0
            since = now
            for earlier, other in reversed(looks[:last]):
                if (other[rank][0] if rank in other else 0) != number:
                    break
                since = earlier
            if now - since > limit:
                here.append(rank)
        found.append(tuple(here))
    return tuple(found)
""",
    },
}
