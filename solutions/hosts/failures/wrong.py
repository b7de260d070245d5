"""Typical wrong answers and lazy cheats of the exercises on failures."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "interval, percent, larger, first, again = "
_WRITE = '    storage.write(f"{step}/{host}", shard)\n'
_SHARDS = "    yield  # every shard is there\n"
_INDEX = """    if host == 0:
        storage.write("new index", str(step).encode())
        storage.rename("new index", "index")
"""
_FOUND = "    yield  # the new save is found\n"
_CLEAN = """    for name in storage.names():
        if name.endswith(f"/{host}") and name != f"{step}/{host}":
            storage.remove(name)
"""
_NEWEST = """
def load(storage, num_hosts):
    steps = [int(name.split("/")[0]) for name in storage.names() if "/" in name]
    if not steps:
        return None
    return max(steps), [storage.read(f"{max(steps)}/{host}") for host in range(num_hosts)]
"""
_SAVE = "\ndef save(storage, host, num_hosts, step, shard):\n" + _WRITE + "    yield\n" + _CLEAN

TYPICAL = {
    "failures-1": {
        "no two under the root": Bad(_PREDICT + "509, 10, 360, 241, 12", "twice the seconds"),
        "one term": Bad(_PREDICT + "720, 5, 360, 241, 12", "both terms count"),
        "a quarter": Bad(_PREDICT + "720, 10, 180, 241, 12", "the root of that"),
        "the step that is saved": Bad(_PREDICT + "720, 10, 360, 240, 12", "the weights after that step"),
        "the step that was not finished": Bad(_PREDICT + "720, 10, 360, 241, 13", "was not finished"),
    },
    "failures-2": {
        "index before the files": Bad([(_WRITE + _SHARDS + _INDEX, _INDEX + _SHARDS + _WRITE)], "load "),
        "no barrier before the index": Bad([(_SHARDS, "")], "load "),
        "no barrier behind the index": Bad([(_FOUND, "")], "load raised FileNotFoundError"),
        "in place": Bad([("{step}/{host}", "shard/{host}")], "load returned step 15 with"),
        "old files first": Bad([(_CLEAN, ""), (_WRITE, _CLEAN + _WRITE)], "load raised FileNotFoundError"),
        "every host renames": Bad([("    if host == 0:\n", "    if True:\n")], "raised FileNotFoundError: new index"),
        "the index in place": Bad(
            [('write("new index"', 'write("index"'), ('        storage.rename("new index", "index")\n', "")],
            "in the middle of its write index",
        ),
        "never removed": Bad([(_CLEAN, "")], "times the bytes of a save, 2 may stay"),
        "a yield of one host alone": Bad([(_FOUND, "        yield\n")], "every host needs the same number of yields"),
        "the newest names": Bad(_NEWEST + _SAVE, "load raised FileNotFoundError"),
        "all names are there": Bad(
            _NEWEST.replace('if "/" in name]', "if step_is_there(name, storage, num_hosts)]")
            + _SAVE
            + """
def step_is_there(name, storage, num_hosts):
    return all(f"{name.split('/')[0]}/{host}" in storage.names() for host in range(num_hosts))
""",
            "half of host",
        ),
        "steps as text": Bad(
            """
def save(storage, host, num_hosts, step, shard):
    storage.write(f"{step}/{host}", shard)
    yield
    if host == 0:
        storage.write(f"done {step}", b"")
    yield
    for name in storage.names():
        if name not in (f"{step}/{host}", f"done {step}") and (name[:4] == "done" or name.endswith(f"/{host}")):
            storage.remove(name)

def load(storage, num_hosts):
    done = sorted(name for name in storage.names() if name.startswith("done"))
    if not done:
        return None
    step = int(done[-1].split()[1])
    return step, [storage.read(f"{step}/{host}") for host in range(num_hosts)]
""",
            "load ",
        ),
        "all shards, whoever wrote them": Bad(
            """
def save(storage, host, num_hosts, step, shard):
    storage.write(f"part {host}", shard)
    storage.rename(f"part {host}", f"{step}/{host}")
    yield
    for name in storage.names():
        if name.endswith(f"/{host}") and name != f"{step}/{host}":
            storage.remove(name)

def load(storage, num_hosts):
    names = storage.names()
    for step in sorted({int(name.split("/")[0]) for name in names if "/" in name}, reverse=True):
        wanted = [f"{step}/{host}" for host in range(num_hosts)]
        if all(name in names for name in wanted):
            return step, [storage.read(name) for name in wanted]
    return None
""",
            "these are shards of two saves",
        ),
        "two places without a barrier at the end": Bad(
            """
def save(storage, host, num_hosts, step, shard):
    place = step // 5 % 2
    storage.write(f"{place}/{host}", shard)
    yield
    if host == 0:
        storage.write("new index", str(step).encode())
        storage.rename("new index", "index")

def load(storage, num_hosts):
    if "index" not in storage.names():
        return None
    step = int(storage.read("index"))
    return step, [storage.read(f"{step // 5 % 2}/{host}") for host in range(num_hosts)]
""",
            "these are shards of two saves",
        ),
    },
    "failures-3": {
        "more patience": Bad([("> limit", "> 2 * limit")], "expected [1]"),
        "the first look corrects the clocks": Bad(
            """
def silent(looks, ranks, limit):
    found, offset = [], {}
    for now, beats in looks:
        for rank in beats:
            offset.setdefault(rank, now - beats[rank][1])
        found.append([r for r in ranks if r not in beats or now - beats[r][1] - offset[r] > limit])
    return found
""",
            "got",
        ),
        "looks are counted": Bad(
            [
                ("numbers[rank], since[rank] = number, now", "numbers[rank], since[rank] = number, len(found)"),
                ("now - since[rank] > limit", "(len(found) - since[rank]) * 0.7 > limit"),
            ],
            "run ",
        ),
        "only larger numbers": Bad(
            [("number != numbers[rank]", "(number or 0) > (numbers[rank] or 0)")], "is started again and counts from 1"
        ),
        "never beaten is well": Bad([("for rank in ranks if", "for rank in beats if")], "never beats"),
        "dead for good": Bad(
            [
                (
                    "[rank for rank in ranks if now - since[rank] > limit]",
                    "[r for r in ranks if now - since[r] > limit or (found and r in found[-1])]",
                )
            ],
            "silent for some seconds",
        ),
        "absolute difference": Bad(
            """
def silent(looks, ranks, limit):
    return [[r for r in ranks if abs(now - beats.get(r, (0, -1e9))[1]) > limit] for now, beats in looks]
""",
            "60 s behind",
        ),
    },
}

CHEATS = {
    "failures-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "interval = percent = larger = first = again = Anything()", "must be a whole number"
        ),
    },
    "failures-2": {
        "nothing is saved": Bad(
            "def save(storage, host, num_hosts, step, shard):\n    yield\n\n"
            "def load(storage, num_hosts):\n    return None",
            "load returned None, expected step",
        ),
        "kept outside of the storage": Bad(
            """
kept = {}

def save(storage, host, num_hosts, step, shard):
    kept.setdefault(step, {})[host] = shard
    yield

def load(storage, num_hosts):
    whole = [step for step in kept if len(kept[step]) == num_hosts]
    return (max(whole), [kept[max(whole)][host] for host in range(num_hosts)]) if whole else None
""",
            "load returned",
        ),
    },
    "failures-3": {
        "nobody": Bad("def silent(looks, ranks, limit):\n    return [[] for _ in looks]", "got [], expected [1]"),
        "everybody": Bad("def silent(looks, ranks, limit):\n    return [ranks for _ in looks]", "expected []"),
    },
}
