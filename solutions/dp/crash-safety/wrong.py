"""Typical wrong answers and lazy cheats of the exercises on saves that survive a crash."""

from bad_answer import EQUAL_TO_ALL, Bad

_SYNC_PARTS = '        disk.sync(f"{folder}/{part}")\n'
_NEW = '    disk.write("run/latest.new", name)\n    disk.sync("run/latest.new")\n'
_REPLACE = '    disk.replace("run/latest.new", "run/latest")\n'

TYPICAL = {
    "crash_safety-1": {
        "east is sound": Bad([('(6, ["names run/step-2"])', "None")], "east: this order has a flaw"),
        "west is flawed": Bad([("None", '(7, ["names run"])')], "try to prove that there is no flaw"),
        "too early": Bad([('(7, ["data', '(3, ["data'), ("run/step-2/b", "run/.new/b")], "a reader is well served"),
    },
    "crash_safety-2": {
        "files not synced": Bad([(_SYNC_PARTS, "")], "sync every file for its bytes"),
        "folder not synced": Bad([("    disk.sync(folder)\n", "")], "sync the folder for its names"),
        "latest in place": Bad([(_NEW, '    disk.write("run/latest", name)\n'), (_REPLACE, "")], "may hold 'ste'"),
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
        "equal to everything": Bad(
            EQUAL_TO_ALL + "found = {n: (Anything(), ['all']) for n in ('north', 'east', 'south', 'west')}",
            "operations that are done",
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
