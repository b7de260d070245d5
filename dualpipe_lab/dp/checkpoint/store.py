"""`StorePath`: a place in an object store, such as s3://runs/first, with the methods of a `Path` that checkpoints need.

Chapter: book/dp/io.  In: an address with "://".  Out: bytes of files, through fsspec.
An object store has no folders, no renames and no locks.  A save writes the files of all ranks first and the index last;
without an index there is no checkpoint, so a save that dies leaves the one before.  Files and index carry the token of
their save, by which a file that a dead save has left is told from one of this save.
Elsewhere: `torch.distributed.checkpoint`'s FsspecWriter; universal_pathlib.
"""

from pathlib import Path
from posixpath import basename, dirname
from typing import BinaryIO, Literal, NamedTuple, TypeAlias


class Size(NamedTuple):
    """The size of a file, under the name that `Path.stat` gives it."""

    st_size: int


class StorePath:
    """A file or a folder of an object store.

    >>> place = StorePath("memory://runs/first") / "step-00000003"
    >>> print(place, place.name, place.is_dir())
    memory://runs/first/step-00000003 step-00000003 False

    Args:
        address: with its protocol; fsspec says which there are, and which package each of them needs.

    Raises:
        ValueError: no package here knows the protocol.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._open_store()

    def _open_store(self) -> None:
        from fsspec.core import url_to_fs  # takes a tenth of a second

        try:
            self._store, self._path = url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{self.address} names a store that this installation does not reach: {error}") from error

    def __truediv__(self, name: str) -> "StorePath":
        return StorePath(f"{self.address}/{name}")

    def __str__(self) -> str:
        return self.address

    def __repr__(self) -> str:
        return f"StorePath({self.address!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and other.address == self.address

    def __hash__(self) -> int:
        return hash(self.address)

    def __reduce__(self) -> tuple[type["StorePath"], tuple[str]]:
        return StorePath, (self.address,)  # connections do not travel

    @property
    def name(self) -> str:
        """The last part."""
        return basename(self.address)

    @property
    def parent(self) -> "StorePath":
        """The folder around it."""
        return StorePath(dirname(self.address))

    def open(self, mode: Literal["rb", "wb"]) -> BinaryIO:
        """Open a file; what is written is there when it is closed."""
        return self._store.open(self._path, mode)  # type: ignore[no-any-return]

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return a file's text."""
        return str(self._store.cat_file(self._path).decode(encoding))

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Write a file, whole or not at all."""
        self._store.pipe_file(self._path, text.encode(encoding))

    def is_file(self) -> bool:
        """Whether it is a file."""
        return bool(self._store.isfile(self._path))

    def is_dir(self) -> bool:
        """Whether some file lies in it."""
        return bool(self._store.isdir(self._path))

    def stat(self) -> Size:
        """Return the size of a file."""
        return Size(int(self._store.info(self._path)["size"]))

    def names(self) -> list[str]:
        """Return what lies in it; nothing if it is not there."""
        self._store.invalidate_cache()  # other hosts write into it
        return (
            [basename(path.rstrip("/")) for path in self._store.ls(self._path, detail=False)] if self.is_dir() else []
        )

    def make_folder(self) -> None:
        """Make the folder, where the store has any."""
        self._store.makedirs(self._path, exist_ok=True)

    def remove(self) -> None:
        """Remove a file, or a folder with all that is in it."""
        self._store.rm(self._path, recursive=True)


Place: TypeAlias = Path | StorePath


def place_of(folder: "Place | str") -> Place:
    """Return where checkpoints lie: a folder of a disk, or with "://" of an object store.

    >>> place_of("runs/first").name, place_of("memory://runs/first").name
    ('first', 'first')
    """
    if isinstance(folder, StorePath):
        return folder
    return StorePath(folder) if isinstance(folder, str) and "://" in folder else Path(folder)
