"""Right answers of another style to the exercises on saves that survive a crash."""

RIGHT = {
    "crash_safety-1": {
        "earlier and more": """
found = {
    "north": (6, ["data run/step-2/b"]),
    "east": [6, ("names run/step-2",)],
    "south": (8, ["names run"]),
    "west": None,
}
""",
        "put together": """
found = dict(west=None, south=(8, ["names " + "run"]), east=(6, ["names run/step-2"]))
found["north"] = 7, ["data run/step-2/" + part for part in "b"]
""",
    },
    "crash_safety-2": {
        "all writes first": """
def save(disk, step, parts):
    folder = f"run/step-{step}"
    if disk.exists(folder):
        disk.remove(folder)
    disk.mkdir(folder)
    for part in sorted(parts):
        disk.write(f"{folder}/{part}", parts[part])
    disk.write("run/.latest", f"step-{step}".encode())
    for path in [*(f"{folder}/{part}" for part in parts), folder, "run/.latest", "run"]:
        disk.sync(path)
    disk.replace("run/.latest", "run/latest")
    disk.sync("run")
    disk.remove(f"run/step-{step - 1}")
    disk.sync("run")
""",
        "the pointer in a folder that is not read": """
def save(disk, step, parts):
    folder = f"run/step-{step}"
    for old in (folder, "run/scratch"):
        if disk.exists(old):
            disk.remove(old)
    disk.mkdir(folder)
    disk.mkdir("run/scratch")
    for part, data in parts.items():
        disk.write(f"{folder}/{part}", data)
        disk.sync(f"{folder}/{part}")
    disk.sync(folder)
    disk.write("run/scratch/latest", f"step-{step}".encode())
    disk.sync("run/scratch/latest")
    disk.sync("run/scratch")
    disk.sync("run")
    disk.replace("run/scratch/latest", "run/latest")
    disk.sync("run")
    disk.remove("run/scratch")
    disk.remove(f"run/step-{step - 1}")
""",
    },
}
