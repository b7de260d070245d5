"""Output of the ranks, printed by the thread that runs the cell.

ordered   rank 0 live, then the other ranks in rank order: the same text in every run
live      at once, each line with its rank as prefix
collect   not printed; `Results.output` holds it
"""

import codecs
import sys
from typing import Literal

OutputMode = Literal["ordered", "live", "collect"]
MODES: tuple[OutputMode, ...] = ("ordered", "live", "collect")
MAX_CHARACTERS = 4_000_000  # per rank and stream: a flood must not fill the kernel's memory or the notebook


class Output:
    """Standard output and standard error of all ranks of one launch."""

    def __init__(self, world_size: int, mode: OutputMode) -> None:
        self._mode = mode
        self._outputs = [_RankOutput(rank) for rank in range(world_size)]
        self._live_rank = 0

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Store bytes that a rank wrote to `stdout` or `stderr`, and print them if the mode says so."""
        self._outputs[rank].feed(stream, data)
        if self._mode == "live":
            self._outputs[rank].print_lines()
        elif self._mode == "ordered" and rank == self._live_rank:
            self._outputs[rank].print_rest()

    def finish(self, rank: int) -> None:
        """Mark a rank's output as complete, and print what waited for it."""
        self._outputs[rank].finished = True
        if self._mode == "live":
            self._outputs[rank].print_lines(last=True)
        elif self._mode == "ordered":
            while self._live_rank < len(self._outputs) and self._outputs[self._live_rank].finished:
                self._outputs[self._live_rank].print_rest()
                self._live_rank += 1
            if self._live_rank < len(self._outputs):
                self._outputs[self._live_rank].print_rest()

    def texts(self) -> list[str]:
        """Standard output of each rank, in rank order."""
        return ["".join(output.written["stdout"]) for output in self._outputs]


class _RankOutput:
    """Output of one rank: the text so far and the part that is not printed yet."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.finished = False
        self.written: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._unprinted = {"stdout": "", "stderr": ""}
        self._length = {"stdout": 0, "stderr": 0}
        self._decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in self.written}

    def feed(self, stream: str, data: bytes) -> None:
        text = self._decoders[stream].decode(data)
        remaining = MAX_CHARACTERS - self._length[stream]
        self._length[stream] += len(text)
        if remaining <= 0:
            return
        if len(text) > remaining:
            notice = f"[rank {self._rank} wrote more than {MAX_CHARACTERS:,} characters; the rest is dropped]"
            text = f"{text[:remaining]}\n{notice}\n"
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
