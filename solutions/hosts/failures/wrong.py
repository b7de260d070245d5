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

TYPICAL = {
    "failures-1": {
        "no two under the root": Bad(_PREDICT + "509, 10, 360, 241, 12", "twice the seconds"),
        "one term": Bad(_PREDICT + "720, 5, 360, 241, 12", "both terms count"),
        "a quarter": Bad(_PREDICT + "720, 10, 180, 241, 12", "the root of that"),
    },
    "failures-2": {
        "index before the files": Bad([(_WRITE + _SHARDS + _INDEX, _INDEX + _SHARDS + _WRITE)], "load "),
        "no barrier behind the index": Bad([(_FOUND, "")], "load raised FileNotFoundError"),
        "in place": Bad([("{step}/{host}", "shard/{host}")], "load returned step 15 with"),
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
    },
    "failures-3": {
        "nobody": Bad("def silent(looks, ranks, limit):\n    return [[] for _ in looks]", "got [], expected [1]"),
    },
}
