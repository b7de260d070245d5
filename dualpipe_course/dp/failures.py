"""Power failures of one's own choice, and saves that a file `latest` points to.

Chapter: book/dp/crash-safety.  In: operations on a `Disk`.  Out: what a reader finds when the power is back.
  lost "data PATH"     the file has what it had at its last sync
  lost "names PATH"    the folder has the names that it had at its last sync
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from dualpipe_course.dp.disk import Disk, File, Folder, PowerFailure
from dualpipe_course.trial import on_ranks

WHOLE = {step: {"a": f"a of step {step}".encode(), "b": f"b of step {step}".encode()} for step in (1, 2)}


class ReplacingDisk(Disk):
    """A disk with `replace`; each new name in `run` may be lost by itself."""

    def replace(self, old: str, new: str) -> None:
        """Give a file another name, in one step; what had the name before is gone."""
        self._operate("replace", f"{old} {new}")
        source, name = self._parent(old)
        target, other = self._parent(new)
        if name not in source.names:
            raise FileNotFoundError(old)
        target.names[other] = source.names.pop(name)

    def after_failure(self) -> Iterator["Disk"]:
        """Every disk that may be found: each name in `run`, the names below, the data, kept or not."""
        run = self.root.names["run"]
        assert isinstance(run, Folder)  # it is there from the start
        pending = [name for name in {**run.kept, **run.names} if run.kept.get(name) is not run.names.get(name)]
        for choice in product((True, False), repeat=len(pending)):
            there = dict(run.kept)
            for name, survives in zip(pending, choice, strict=True):
                if survives and name in run.names:
                    there[name] = run.names[name]
                elif survives:
                    del there[name]
            for names, data in product((True, False), ("all", "half", "kept")):
                found = ReplacingDisk()
                found.root.names["run"] = _left(there, names, data)
                yield found


def _left(there: Mapping[str, Any], names: bool, data: str) -> Folder:
    found = Folder()
    for name, node in there.items():
        if isinstance(node, Folder):
            found.names[name] = _left(node.names if names else node.kept, names, data)
        else:
            half = node.data[: len(node.data) // 2] if node.data != node.kept else node.kept
            found.names[name] = File(*[{"all": node.data, "half": half, "kept": node.kept}[data]] * 2)
    found.kept = dict(found.names)
    return found


def first_disk(kind: type[Disk] = Disk, latest: bool = False) -> Any:
    """A disk with step 1, for good; with the file `latest` or without."""
    disk = kind()
    disk.mkdir("run/step-1")
    for name, data in WHOLE[1].items():
        disk.write(f"run/step-1/{name}", data)
        disk.sync(f"run/step-1/{name}")
    if latest:
        disk.write("run/latest", b"step-1")
        disk.sync("run/latest")
    disk.sync("run/step-1")
    disk.sync("run")
    disk.log = []
    return disk


def run_operations(disk: Disk, operations: Sequence[str]) -> None:
    """Do what a log says, such as `write run/step-2/a`; a file gets the bytes of step 2."""
    for operation in operations:
        kind, *paths = operation.split()
        if kind == "write":
            disk.write(paths[0], WHOLE[2][paths[0][-1]])
        else:
            getattr(disk, kind)(*paths)


def pending(disk: Disk) -> list[str]:
    """What may be lost: data of files and names in folders that are not as they were at their last sync."""
    return [what for what, node in _walk(disk.root.names["run"], "run") if _differs(node)]


def lose(disk: Disk, lost: Sequence[str]) -> Disk:
    """The disk that is found after these are lost and everything else has survived."""
    found = Disk()
    found.root.names["run"] = _without(disk.root.names["run"], "run", set(lost))
    return found


def verdict(disk: Disk, has_returned: bool) -> str:
    """What is wrong with a disk, in words; an empty string if a reader is well served."""
    steps = sorted(name for name in disk.listing("run") if name.startswith("step-"))
    if not steps:
        return "no checkpoint is left"
    newest = disk.listing(f"run/{steps[-1]}")
    if newest != WHOLE[int(steps[-1][-1])]:
        return f"{steps[-1]} is there and not whole"
    return "save had returned, and step-2 is gone" if has_returned and steps[-1] != "step-2" else ""


def _differs(node: File | Folder) -> bool:
    return node.data != node.kept if isinstance(node, File) else node.names != node.kept


def _walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, File):
        yield f"data {path}", node
        return
    yield f"names {path}", node
    for name, child in node.names.items():
        yield from _walk(child, f"{path}/{name}")


def _without(node: Any, path: str, lost: set[str]) -> Any:
    if isinstance(node, File):
        return File(*[node.kept if f"data {path}" in lost else node.data] * 2)
    found = Folder()
    for name, child in (node.kept if f"names {path}" in lost else node.names).items():
        now = next((other for other, same in node.names.items() if same is child), name)  # as the process names it
        found.names[name] = _without(child, f"{path}/{now}", lost)
    return found


def check_pointed(fn: Callable[..., Any]) -> str:
    """What is wrong with a save behind a pointer, in words; an empty string if nothing is."""
    problem: str = on_ranks(_save_and_fail, 1, fn, case="saving")[0]
    return problem


def _save_and_fail(rank: int, world_size: int, fn: Callable[..., Any]) -> str:
    disk = first_disk(ReplacingDisk, latest=True)
    fn(disk, 2, dict(WHOLE[2]))
    log = disk.log[:]
    problem = _pointed_damage(disk, "after save has returned", must_be_new=True)
    if not problem and disk.exists("run/step-1"):
        problem = "save has returned, and step-1 is still there; remove it when nothing needs it any more"
    for lives in range(0 if problem else len(log)):
        disk = first_disk(ReplacingDisk, latest=True)
        disk.lives = lives
        when = f"before operation {lives + 1} ({log[lives]})"
        try:
            fn(disk, 2, dict(WHOLE[2]))
        except PowerFailure:
            problem = _pointed_damage(disk, when, must_be_new=False) or _again(fn, disk, when)
        if problem:
            break
    return f"{problem}\n  your operations: {', '.join(log)}" if problem else ""


def _pointed_damage(disk: Disk, when: str, must_be_new: bool) -> str:
    lost = f"the power fails {when}: "
    for found in disk.after_failure():
        held = found.listing("run")
        latest = held.get("latest")
        if latest not in (b"step-1", b"step-2"):
            said = "is gone" if latest is None else f"may hold {latest.decode()!r}"
            return f"{lost}the file latest {said}; write another file, sync it, and let it replace this one"
        if must_be_new and latest != b"step-2":
            return f"{lost}latest may still name step-1; its name is kept when run is synced"
        name = latest.decode()
        if name not in held:
            why = "sync run before latest names it" if name == "step-2" else "remove it when latest is kept on the disk"
            return f"{lost}latest names {name}, and {name} is not there; {why}"
        if (files := found.listing(f"run/{name}")) != WHOLE[int(name[-1])]:
            part = next(part for part in ("a", "b") if files.get(part) != WHOLE[int(name[-1])][part])
            why = "sync the folder for its names" if part not in files else "sync every file for its bytes"
            return f"{lost}latest names {name}, and {part} of {name} may not be whole; {why} before that"
    return ""


def _again(fn: Callable[..., Any], disk: Disk, when: str) -> str:
    for found in disk.after_failure():
        if found.listing("run")["latest"] == b"step-2":
            continue
        try:
            fn(found, 2, dict(WHOLE[2]))
        except OSError as error:
            return (
                f"the power fails {when}, the run starts again, and its save stops with {type(error).__name__}: {error}"
            )
        if problem := _pointed_damage(found, "after the save of a run that started again", must_be_new=True):
            return problem
    return ""
