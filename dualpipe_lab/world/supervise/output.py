"""What the ranks print, brought into the notebook by the thread that runs the cell.

`ordered`: rank 0 live, then the others' output in rank order: the same text every time.
`live`: as it comes, each line prefixed with its rank.  `collect`: nothing is printed; `Results.output` holds it.
"""

import codecs
import sys
from typing import Literal

OutputMode = Literal["ordered", "live", "collect"]
MODES: tuple[OutputMode, ...] = ("ordered", "live", "collect")
MAX_CHARACTERS = 4_000_000  # per rank and stream: a flood must not fill the kernel's memory or the notebook


class Output:
    """The standard output and error of all ranks of one launch."""

    def __init__(self, world_size: int, mode: OutputMode) -> None:
        self._mode = mode
        self._pages = [_Page(rank) for rank in range(world_size)]
        self._live_rank = 0

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take what a rank wrote to `stdout` or `stderr`, and print what is due."""
        self._pages[rank].feed(stream, data)
        if self._mode == "live":
            self._pages[rank].print_lines()
        elif self._mode == "ordered" and rank == self._live_rank:
            self._pages[rank].print_rest()

    def finish(self, rank: int) -> None:
        """Note that a rank will write no more."""
        self._pages[rank].finished = True
        if self._mode == "live":
            self._pages[rank].print_lines(last=True)
        elif self._mode == "ordered":
            while self._live_rank < len(self._pages) and self._pages[self._live_rank].finished:
                self._pages[self._live_rank].print_rest()
                self._live_rank += 1
            if self._live_rank < len(self._pages):
                self._pages[self._live_rank].print_rest()

    def texts(self) -> list[str]:
        """All that each rank wrote to its standard output."""
        return ["".join(page.written["stdout"]) for page in self._pages]


class _Page:
    """One rank's text: all of it, and what of it has not been printed."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.finished = False
        self.written: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._unprinted = {"stdout": "", "stderr": ""}
        self._length = {"stdout": 0, "stderr": 0}
        self._decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in self.written}

    def feed(self, stream: str, data: bytes) -> None:
        text = self._decoders[stream].decode(data)
        room = MAX_CHARACTERS - self._length[stream]
        self._length[stream] += len(text)
        if room <= 0:
            return
        if len(text) > room:
            notice = f"[rank {self._rank} wrote more than {MAX_CHARACTERS:,} characters; the rest is dropped]"
            text = f"{text[:room]}\n{notice}\n"
        self.written[stream].append(text)
        self._unprinted[stream] += text

    def print_rest(self) -> None:
        for stream, text in self._unprinted.items():
            _print(stream, text)
            self._unprinted[stream] = ""

    def print_lines(self, last: bool = False) -> None:
        for stream, text in self._unprinted.items():
            end = len(text) if last else text.rfind("\n") + 1
            lines = text[:end].splitlines()
            _print(stream, "".join(f"[rank {self._rank}] {line}\n" for line in lines))
            self._unprinted[stream] = text[end:]


def _print(stream: str, text: str) -> None:
    if text:
        target = sys.stdout if stream == "stdout" else sys.stderr
        target.write(text)
        target.flush()
