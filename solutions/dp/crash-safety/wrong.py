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
}
