"""Right answers of another style to the exercises on saving and loading."""

RIGHT = {
    "io-2": {
        "from the first file to the last": """
def load_shard(read, numel, num_files, num_ranks, rank):
    size, share = (numel + num_files - 1) // num_files, (numel + num_ranks - 1) // num_ranks
    place, stop = min(rank * share, numel), min(rank * share + share, numel)
    out = torch.empty(stop - place)
    filled = 0
    while place < stop:
        file = place // size
        last = min(stop, (file + 1) * size)
        out[filled : filled + last - place] = read(file, place - file * size, last - file * size)
        filled, place = filled + last - place, last
    return out
""",
        "by sets of elements": """
def load_shard(read, numel, num_files, num_ranks, rank):
    size, share = -(-numel // num_files), -(-numel // num_ranks)
    mine = [i for i in range(numel) if i // share == rank]
    found = [torch.zeros(0)]
    for file in sorted({i // size for i in mine}):
        inside = [i % size for i in mine if i // size == file]
        found.append(read(file, inside[0], inside[-1] + 1))
    return torch.hstack(found)
""",
    },
    "io-3": {
        "another hidden name, files synced after all were written": """
def save(disk, name, parts):
    temporary = f"run/tmp-{name}"
    if disk.exists(temporary):
        disk.remove(temporary)
    disk.mkdir(temporary)
    for part in parts:
        disk.write(temporary + "/" + part, parts[part])
    for part in parts:
        disk.sync(temporary + "/" + part)
    disk.sync(temporary)
    disk.rename(temporary, "run/" + name)
    disk.sync("run")
""",
        "leftovers overwritten one by one": """
def save(disk, name, parts):
    hidden = f"run/.{name}"
    if not disk.exists(hidden):
        disk.mkdir(hidden)
    for part, data in parts.items():
        path = f"{hidden}/{part}"
        if disk.exists(path):
            disk.remove(path)
        disk.write(path, data)
        disk.sync(path)
    disk.sync(hidden)
    disk.rename(hidden, f"run/{name}")
    disk.sync("run")
""",
    },
    "io-4": {
        "under no_grad": """
def resume(saved, adam, rank):
    with torch.no_grad():
        for p, value in zip(adam.parameters, saved["parameters"], strict=True):
            p[:] = value
        for ours, theirs in zip(adam.moments, saved["moments"], strict=True):
            for a, b in zip(ours, theirs):
                a.copy_(b)
    adam.num_steps = saved["num_steps"]
    torch.random.set_rng_state(saved["random"][rank].clone())
    return int(saved["next_batch"])
""",
        "new moments, cloned": [
            ("    for (first, second), (mu, nu) in zip(adam.moments, saved[\"moments\"]):\n"
             "        first.copy_(mu)\n        second.copy_(nu)\n",
             "    adam.moments = [(mu.clone(), nu.clone()) for mu, nu in saved[\"moments\"]]\n"),
        ],
    },
}  # fmt: skip
