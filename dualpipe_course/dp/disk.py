"""A disk that forgets: what was not synced may be lost when the power fails.

Chapter: book/dp/crash-safety.  In: operations on files and folders.  Out: the disk as a power failure leaves it.
  data of a file     kept by sync(file); otherwise what was kept before, or half of the new, or all of it
  names in a folder  kept by sync(folder): files made in it, folders made in it, names changed by rename
Source: Pillai et al. 2014, All File Systems Are Not Created Equal (OSDI).
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Union


class PowerFailure(BaseException):
    """Nothing of the process survives this; no except clause should see it."""


class File:
    """Bytes as the process sees them, and as they lie on the disk."""

    def __init__(self, data: bytes = b"", kept: bytes = b"") -> None:
        self.data, self.kept = data, kept


class Folder:
    """Names as the process sees them, and as they lie on the disk."""

    def __init__(self) -> None:
        self.names: dict[str, Node] = {}
        self.kept: dict[str, Node] = {}


Node = Union[File, Folder]  # noqa: UP007 - the names on either side need it


class Disk:
    """Files and folders, by paths such as `run/step-2/a`; `run` is there from the start.

    Args:
        lives: operations until the power fails (default: it does not).
    """

    def __init__(self, lives: int | None = None) -> None:
        self.root, self.lives = Folder(), lives
        self.log: list[str] = []
        self.root.names["run"] = self.root.kept["run"] = Folder()

    def write(self, path: str, data: bytes) -> None:
        """Write a file, new or not, into a folder that exists."""
        self._operate("write", path)
        parent, name = self._parent(path)
        node = parent.names.setdefault(name, File())
        if not isinstance(node, File):
            raise IsADirectoryError(path)
        node.data = bytes(data)

    def sync(self, path: str) -> None:
        """Keep the data of a file, or the names in a folder."""
        self._operate("sync", path)
        node = self._node(path)
        if isinstance(node, File):
            node.kept = node.data
        else:
            node.kept = dict(node.names)

    def mkdir(self, path: str) -> None:
        """Make a folder."""
        self._operate("mkdir", path)
        parent, name = self._parent(path)
        if name in parent.names:
            raise FileExistsError(path)
        parent.names[name] = Folder()

    def rename(self, old: str, new: str) -> None:
        """Give a file or a folder another name, in one step."""
        self._operate("rename", f"{old} {new}")
        source, name = self._parent(old)
        target, other = self._parent(new)
        if name not in source.names:
            raise FileNotFoundError(old)
        if other in target.names:
            raise FileExistsError(new)
        target.names[other] = source.names.pop(name)

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it."""
        self._operate("remove", path)
        parent, name = self._parent(path)
        if name not in parent.names:
            raise FileNotFoundError(path)
        del parent.names[name]

    def exists(self, path: str) -> bool:
        """Whether there is a file or a folder of this name."""
        try:
            self._node(path)
        except FileNotFoundError:
            return False
        return True

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
                found = Disk()
                found.root.names["run"] = _left(there, names, data)
                yield found

    def listing(self, path: str) -> dict[str, bytes | None]:
        """The names in a folder, with the data of files."""
        node = self._node(path)
        names = node.names if isinstance(node, Folder) else {}
        return {name: child.data if isinstance(child, File) else None for name, child in names.items()}

    def _operate(self, kind: str, path: str) -> None:
        if self.lives is not None and len(self.log) >= self.lives:
            raise PowerFailure
        self.log.append(f"{kind} {path}")

    def _node(self, path: str) -> Node:
        node: Node = self.root
        for name in path.strip("/").split("/"):
            if not isinstance(node, Folder) or name not in node.names:
                raise FileNotFoundError(path)
            node = node.names[name]
        return node

    def _parent(self, path: str) -> tuple[Folder, str]:
        above, _, name = path.strip("/").rpartition("/")
        node = self._node(above) if above else self.root
        if not isinstance(node, Folder):
            raise NotADirectoryError(above)
        return node, name


def _left(there: Mapping[str, "Node"], names: bool, data: str) -> Folder:
    found = Folder()
    for name, node in there.items():
        if isinstance(node, Folder):
            found.names[name] = _left(node.names if names else node.kept, names, data)
        else:
            half = node.data[: len(node.data) // 2] if node.data != node.kept else node.kept
            found.names[name] = File(*[{"all": node.data, "half": half, "kept": node.kept}[data]] * 2)
    found.kept = dict(found.names)
    return found
