"""Typical wrong answers and lazy cheats of the exercises on saves that survive a crash."""

from bad_answer import Bad

_SYNC_PARTS = '        disk.sync(f"{folder}/{part}")\n'

TYPICAL = {
    "crash_safety-1": {
        "east is sound": Bad([('(6, ["names run/step-2"])', "None")], "east: this order has a flaw"),
        "west is flawed": Bad([("None", '(7, ["names run"])')], "try to prove that there is no flaw"),
        "none lost": Bad([('["names run"]', "[]")], "with nothing lost"),
    },
    "crash_safety-2": {
        "files not synced": Bad([(_SYNC_PARTS, "")], "sync every file for its bytes"),
        "folder not synced": Bad([("    disk.sync(folder)\n", "")], "sync the folder for its names"),
        "name not synced": Bad(
            [('    disk.sync(folder)\n    disk.sync("run")\n', "    disk.sync(folder)\n")],
            "sync run before latest names it",
        ),
    },
    "crash_safety-3": {
        "the highest name": Bad([("max(found, default=None)", "max(found, key=str, default=None)")], "9 and 10"),
        "names alone": Bad(
            [("sums == index", "sums.keys() == index"), ('index["files"]\n', 'index["files"].keys()\n')],
            "half of file a",
        ),
        "no step": Bad([('index["step"] == step and ', "")], "all files of step 1 in step-2"),
    },
}

CHEATS = {
    "crash_safety-1": {
        "all are sound": Bad(
            "found = dict.fromkeys(['north', 'east', 'south', 'west'])", "north: this order has a flaw"
        ),
    },
    "crash_safety-2": {
        "saves nothing": Bad("def save(disk, step, parts):\n    pass", "may still name step-1"),
    },
    "crash_safety-3": {
        "looks at sizes": Bad(
            """
def newest(folders):
    steps = [int(n[5:]) for n, files in folders.items()
             if n[:5] == "step-" and n[5:].isdigit() and files.get("a") and files.get("b") and files.get("index")]
    return max(steps, default=None)
""",
            "half an index",
        ),
    },
}
