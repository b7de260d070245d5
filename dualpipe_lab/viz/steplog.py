"""Messages between ranks, step by step: rings, collectives, all-to-all, drawn from a list or from the trace of a run.

Chapter: book/cp/ring-all-reduce.  In: what every rank holds at the start, and the messages of every step, listed
(`Steps`) or taken from a run (`Steps.of_run`).  Out: a drawing that prints, plays and saves itself.
A cell is a text, or a text and the number of a colour: ("x2", 2).  What a rank holds after a step is stated by the
list, or follows from the messages: a cell that arrives is added behind the others.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from dualpipe_lab.timeline import Message, Timeline
from dualpipe_lab.timeline.scene import heading, svg, text
from dualpipe_lab.timeline.spans import Time
from dualpipe_lab.viz.embed import Spec, element, image, page

Cell: TypeAlias = str | tuple[str, int | None]
Held: TypeAlias = Sequence[Sequence[Cell]]  # by rank: the cells it holds
Receive: TypeAlias = Callable[[dict[str, Any], str, Any, int], None]
_Cell: TypeAlias = tuple[str, int | None]

_ROW, _LETTER, _LABEL, _TOP = 22, 6.6, 56, 46  # px


class MessageStep(NamedTuple):
    """Messages (source, destination, cell) that travel together; `holds`: what ranks hold then, None: all that came."""

    title: str
    messages: Sequence[tuple[int, int, Cell]]
    holds: Held | None = None


class Steps:
    """What ranks hold and send, step by step: as listed, or replayed from a run with `Steps.of_run`.

    `start`: by rank, the cells it holds.  `log`: steps (title, [(src, dst, cell), ...]), and what is held afterwards if
    that is not what every rank held and received.

    Raises:
        ValueError: a message from or to a rank that does not exist, or to its sender, or a step that states what
            another number of ranks holds.

    >>> ring = [("around", [(rank, (rank + 1) % 3, f"x{rank}") for rank in range(3)])]
    >>> print(Steps("ring", [["x0"], ["x1"], ["x2"]], ring))
    ring: 3 ranks, 1 step
    1. around: 0->1 x0, 1->2 x1, 2->0 x2
    rank 0: x0 x2
    rank 1: x1 x0
    rank 2: x2 x1
    """

    def __init__(self, name: str, start: Held, log: Iterable[MessageStep | tuple[Any, ...]], note: str = "") -> None:
        self.name, self.note = name, note
        self.start = _cells(start)
        self.log = tuple(MessageStep(*step) for step in log)
        self.states = [self.start]
        for number, step in enumerate(self.log, 1):
            self._check(number, step)
            self.states.append(_after(self.states[-1], step))

    @property
    def num_ranks(self) -> int:
        """The number of ranks, sending or not."""
        return len(self.start)

    @classmethod
    def of_run(
        cls,
        timeline: Timeline,
        name: str = "",
        start: Sequence[Mapping[str, Any]] = (),
        receive: Receive | None = None,
        titles: Sequence[str] = (),
        moves: bool = False,
    ) -> "Steps":
        """Return the messages of a run in rounds, and what every rank holds after each round.

        The round of a message follows the latest round that had reached its sender.  Messages of one round therefore
        did not wait for each other.  A number at the end of a label is the colour of its cell.

        Args:
            timeline: of the run, on a clock that moves between two rounds.
            name: of the drawing (default: that of the timeline).
            start: by rank, its values by name before the first round; without it cards stay empty.  A message carries
                the value that its sender holds under the message's label, or else the label itself.
            receive: `receive(held, label, value, number)` changes the values of the destination in a round (default:
                `held[label] = value`).  It must not change a value in place.
            titles: of the rounds, in order.
            moves: a sender no longer holds what it has sent.

        Raises:
            ValueError: a `start` of another number of ranks.

        >>> messages = [Message(0, 1, sent=0, arrived=2, label="x 0"), Message(1, 0, sent=1, arrived=2, label="x 1")]
        >>> run = Timeline("swap", [[], []], messages)
        >>> print(Steps.of_run(run, start=[{"x 0": 5}, {"x 1": 7}], titles=["both"]))
        swap: 2 ranks, 1 step
        1. both: 0->1 5, 1->0 7
        rank 0: 5 7
        rank 1: 7 5
        """
        name, rounds = name or timeline.name, rounds_of(timeline)
        if start and len(start) != timeline.num_ranks:
            raise ValueError(
                f"{name}: start states what {len(start)} ranks hold, the run has {timeline.num_ranks}; give one "
                "dictionary per rank"
            )
        held = [dict(values) for values in start] or [{} for _ in range(timeline.num_ranks)]
        first, log = [_cells_of(values) for values in held], []
        for number, messages in enumerate(rounds, 1):
            values = [held[message.src].get(message.label, _label(message)) for message in messages]
            for message in messages if moves else ():
                held[message.src].pop(message.label, None)
            for message, value in zip(messages, values, strict=True) if start else ():
                if receive is None:
                    held[message.dst][_label(message)] = value
                else:
                    receive(held[message.dst], _label(message), value, number)
            sent = [
                (message.src, message.dst, (_words_of(value), _colour(message.label, message.src)))
                for message, value in zip(messages, values, strict=True)
            ]
            later = f"sent after round {number - 1} arrived" if number > 1 else "sent before anything arrived"
            title = titles[number - 1] if number <= len(titles) else later
            log.append(MessageStep(title, sent, [_cells_of(values) for values in held]))
        return cls(name, first, log, note=timeline.source)

    def to_html(self, script: bool = True) -> str:
        """Return the element around its static picture, with its script unless the page has it already."""
        return element("dp-steps", self.to_spec(), image(self.to_svg(), f"Steps of {self.name}"), script)

    def to_spec(self) -> Spec:
        """Return what the page needs to draw it."""
        steps = [
            {"title": step.title, "messages": [(s, d, *_cell(c)) for s, d, c in step.messages], "holds": state}
            for step, state in zip(self.log, self.states[1:], strict=True)
        ]
        return {"name": self.name, "note": self.note, "ranks": self.num_ranks, "start": self.start, "steps": steps}

    def to_svg(self) -> str:
        """Return a static picture: what every rank holds at the start and after each step."""
        columns = [["start", *map(_words, self.states[0])]]
        columns += [[f"{n}. {step.title}", *map(_words, self.states[n])] for n, step in enumerate(self.log, 1)]
        x, parts = float(_LABEL), [heading(self.name)]
        for column in columns:
            parts += [text(x, _TOP + row * _ROW, words) for row, words in enumerate(column)]
            x += max(map(len, column)) * _LETTER + 18
        parts += [text(4, _TOP + (rank + 1) * _ROW, f"rank {rank}") for rank in range(self.num_ranks)]
        return svg(x, _TOP + _ROW * (self.num_ranks + 1), f"Steps of {self.name}", parts, scales=False)

    def save(self, path: str | Path) -> None:
        """Write a page of its own: one file that works without a network."""
        Path(path).write_text(page(self.to_html(), self.name), encoding="utf-8")

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.num_ranks} ranks, {len(self.log)} {'step' if len(self.log) == 1 else 'steps'}"]
        for number, step in enumerate(self.log, 1):
            sent = ", ".join(f"{src}->{dst} {_cell(cell)[0]}" for src, dst, cell in step.messages)
            lines.append(f"{number}. {step.title}: {sent}")
        return "\n".join([*lines, *(f"rank {rank}: {_words(held)}" for rank, held in enumerate(self.states[-1]))])

    def __repr__(self) -> str:
        return f"<Steps {self.name!r}: {self.num_ranks} ranks, {len(self.log)} steps>"

    def _repr_html_(self) -> str:
        return self.to_html()

    def _check(self, number: int, step: MessageStep) -> None:
        for src, dst, cell in step.messages:
            if src == dst or not (0 <= src < self.num_ranks and 0 <= dst < self.num_ranks):
                raise ValueError(
                    f"{self.name}, step {number}: {_cell(cell)[0]!r} goes from rank {src} to rank {dst}; a message "
                    f"needs two different ranks from 0 to {self.num_ranks - 1}"
                )
        if step.holds is not None and len(step.holds) != self.num_ranks:
            raise ValueError(
                f"{self.name}, step {number} states what {len(step.holds)} ranks hold, there are {self.num_ranks}; "
                "give one list per rank"
            )


def rounds_of(timeline: Timeline) -> list[list[Message]]:
    """Return the messages of a run by round, those of one round in the order of their senders."""
    rounds: defaultdict[int, list[Message]] = defaultdict(list)
    arrivals: defaultdict[int, list[tuple[Time, int]]] = defaultdict(list)  # by rank: (time, round)
    for message in sorted(timeline.messages, key=lambda message: (message.sent, message.arrived)):
        number = 1 + max((n for time, n in arrivals[message.src] if time <= message.sent), default=0)
        arrivals[message.dst].append((message.arrived, number))
        rounds[number].append(message)
    return [sorted(rounds[number], key=lambda message: (message.src, message.sent)) for number in sorted(rounds)]


def _label(message: Message) -> str:
    return message.label or ("message" if message.num_bytes is None else f"{message.num_bytes} B")


def _colour(label: str, otherwise: int | None = None) -> int | None:
    number = re.search(r"\d+$", label)
    return int(number[0]) if number else otherwise


def _cells_of(values: Mapping[str, Any]) -> list[Cell]:
    return [(_words_of(value), _colour(label)) for label, value in values.items()]


def _words_of(value: Any) -> str:
    """The text of a value: numbers of a tensor or a tuple one after the other."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return ",".join(map(_words_of, value)) or "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(cell: Cell) -> _Cell:
    return (cell, None) if isinstance(cell, str) else (str(cell[0]), cell[1])


def _cells(held: Held) -> list[list[_Cell]]:
    return [list(map(_cell, cells)) for cells in held]


def _after(before: list[list[_Cell]], step: MessageStep) -> list[list[_Cell]]:
    if step.holds is not None:
        return _cells(step.holds)
    state = [list(cells) for cells in before]
    for _, dst, cell in step.messages:
        state[dst].append(_cell(cell))
    return state


def _words(held: Sequence[_Cell]) -> str:
    return " ".join(label for label, _ in held) or "-"
