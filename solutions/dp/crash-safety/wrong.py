"""Typical wrong answers and lazy cheats of the exercises on saves that survive a crash."""

from bad_answer import EQUAL_TO_ALL, Bad

_SYNC_PARTS = '        disk.sync(f"{folder}/{part}")\n'
_NEW = '    disk.write("run/latest.new", name)\n    disk.sync("run/latest.new")\n'
_REPLACE = '    disk.replace("run/latest.new", "run/latest")\n'
_REMOVE = '    disk.remove(f"run/step-{step - 1}")'

TYPICAL = {
    "crash_safety-1": {
        "east is sound": Bad([('(6, ["names run/step-2"])', "None")], "east: this order has a flaw"),
        "west is flawed": Bad([("None", '(7, ["names run"])')], "try to prove that there is no flaw"),
        "too early": Bad([('(7, ["data', '(3, ["data'), ("run/step-2/b", "run/.new/b")], "a reader is well served"),
        "the name before": Bad([("data run/step-2/b", "data run/.new/b")], "cannot be lost"),
        "synced already": Bad(
            [("data run/step-2/b", "data run/step-2/a")], "cannot be lost; what can: data run/step-2/b"
        ),
        "nine operations": Bad([('(8, ["names run"])', '(9, ["names run"])')], "is 0 to 8"),
        "none lost": Bad([('["names run"]', "[]")], "with nothing lost"),
    },
    "crash_safety-2": {
        "files not synced": Bad([(_SYNC_PARTS, "")], "sync every file for its bytes"),
        "folder not synced": Bad([("    disk.sync(folder)\n", "")], "sync the folder for its names"),
        "name not synced": Bad(
            [('    disk.sync(folder)\n    disk.sync("run")\n', "    disk.sync(folder)\n")],
            "sync run before latest names it",
        ),
        "latest in place": Bad([(_NEW, '    disk.write("run/latest", name)\n'), (_REPLACE, "")], "may hold 'ste'"),
        "pointer not synced": Bad([('    disk.sync("run/latest.new")\n', "")], "the file latest may hold"),
        "removed too early": Bad(
            [(_REMOVE, "    pass"), (_NEW, _REMOVE + "\n" + _NEW)], "step-1 is not there; remove it when"
        ),
        "removed before the sync": Bad(
            [('    disk.sync("run")\n' + _REMOVE, _REMOVE + '\n    disk.sync("run")')], "step-1 is not there"
        ),
        "never removed": Bad([(_REMOVE, "    pass")], "step-1 is still there"),
        "latest removed first": Bad([(_REPLACE, '    disk.remove("run/latest")\n' + _REPLACE)], "latest is gone"),
    },
    "crash_safety-3": {
        "the highest name": Bad([("max(found, default=None)", "max(found, key=str, default=None)")], "9 and 10"),
        "names alone": Bad(
            [("sums == index", "sums.keys() == index"), ('index["files"]\n', 'index["files"].keys()\n')],
            "half of file a",
        ),
        "no step": Bad([('index["step"] == step and ', "")], "all files of step 1 in step-2"),
        "errors": Bad([("(KeyError, TypeError, ValueError)", "KeyError")], "raised JSONDecodeError"),
        "hidden ones too": Bad([('start == "" and ', "")], "step 2 hidden"),
        "every file": Bad([('for name in index["files"]', 'for name in files if name != "index"')], "a leftover"),
        "newest alone": Bad(
            """
def newest(folders):
    steps = [int(name[5:]) for name in folders if name.startswith("step-") and name[5:].isdigit()]
    if not steps:
        return None
    files = folders[f"step-{max(steps)}"]
    try:
        index = json.loads(files["index"])
        whole = index["step"] == max(steps) and all(crc32(files[n]) == s for n, s in index["files"].items())
    except Exception:
        whole = False
    return max(steps) if whole else None
""",
            "step 2 without its index: got None, expected 1",
        ),
    },
}

CHEATS = {
    "crash_safety-1": {
        "all are sound": Bad(
            "found = dict.fromkeys(['north', 'east', 'south', 'west'])", "north: this order has a flaw"
        ),
        "only one": Bad("found = {'west': None}", "with the keys north"),
        "equal to everything": Bad(
            EQUAL_TO_ALL + "found = {n: (Anything(), ['all']) for n in ('north', 'east', 'south', 'west')}",
            "operations that are done",
        ),
    },
    "crash_safety-2": {
        "saves nothing": Bad("def save(disk, step, parts):\n    pass", "may still name step-1"),
        "no save, a pointer": Bad(
            "def save(disk, step, parts):\n    disk.write('run/latest', b'step-2')\n    disk.sync('run/latest')",
            "and step-2 is not there",
        ),
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
