"""What the commands read and write: schedules with their options, CSV files, exact costs; pictures, pages, traces."""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import lcm, prod
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, NamedTuple, TypeAlias

import typer

from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.schedules.variants import Variant, read_value, variant
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.torch_csv import from_torch_csv, to_torch_csv
from dualpipe_lab.timeline import Timeline
from dualpipe_lab.timeline.units import number

Options: TypeAlias = dict[str, int | str]
Ranks = Annotated[int, typer.Option(min=1, help="number of ranks, p")]
Microbatches = Annotated[int, typer.Option(min=1, help="number of microbatches, m")]
ShareCost = Annotated[str | None, typer.Option("--cost", help="ticks of a rank's share: F=1,I=1,W=1,FB=2.5,latency=0")]
StageCost = Annotated[str | None, typer.Option("--cost", help="ticks of a stage: F=1,I=1,W=1,FB=2.5,latency=0")]
Memory = Annotated[int | None, typer.Option(min=1, help="activations that a rank has room for, in shares")]

Svg: TypeAlias = Annotated[Path | None, typer.Option(help="write the picture")]
Png: TypeAlias = Annotated[Path | None, typer.Option(help="write the picture as pixels")]
Html: TypeAlias = Annotated[Path | None, typer.Option(help="write a page that plays and recomputes")]
Csv: TypeAlias = Annotated[Path | None, typer.Option(help="write the program for torch.distributed.pipelining")]
Perfetto: TypeAlias = Annotated[Path | None, typer.Option(help="write a trace for ui.perfetto.dev")]

COST_KEYS = {"F": "F", "I": "I", "W": "W", "B": "B", "FB": "overlap", "latency": "latency", "transfer": "transfer"}
_PAIR = re.compile(r"\s*([^=\s]+)\s*=\s*(\S+)\s*")
_NUMBER = re.compile(r"[+-]?[0-9./]{1,40}(e[+-]?[0-9]{1,2})?", re.IGNORECASE)  # 1e999999999 would fill the memory
MAX_CELLS = 2**17  # ranks x microbatches, for each virtual stage: what a command draws or simulates within a minute
MAX_CSV_MB = 20


class CsvFile(NamedTuple):
    """A program in a CSV file, with the methods of a `Variant`; its size is fixed and it has no options."""

    name: str

    def has(self, option: str) -> bool:
        """Return False."""
        return False

    def with_options(self, options: Options) -> "CsvFile":
        """Return the file itself; ValueError for any option."""
        for option in options:
            raise ValueError(f"{self.name} is a program with nothing left open; leave {flag_of(option)} out")
        return self

    def build(self, num_ranks: int, num_microbatches: int) -> Program:
        """Return the program; the requested size is ignored."""
        return self.read()

    def read(self, check: bool = True) -> Program:
        """Return the program; `check=False` accepts an invalid program."""
        found = Path(self.name).stat()
        if not S_ISREG(found.st_mode) or found.st_size > MAX_CSV_MB * 1_000_000:
            raise ValueError(f"{self.name} is no file of at most {MAX_CSV_MB} MB; write one program to it")
        return from_torch_csv(Path(self.name), check=check)

    def title(self, program: Program) -> str:
        """Return the file's name."""
        return program.name


def wanted(text: str) -> Variant | CsvFile:
    """Parse a schedule or a file name: `gpipe`, `interleaved:num_virtual_stages=3` or `mine.csv`."""
    return CsvFile(text) if text.lower().endswith(".csv") else variant(text)


def split(words: Sequence[str]) -> tuple[list[str], Options]:
    """Separate names from the options that the command does not know: those of a schedule's builder."""
    names: list[str] = []
    found: Options = {}
    rest = list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if not flag.startswith("-"):
            names.append(flag + equals + value)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(
                    f"{flag} needs a value, and it is no option of this command; write {flag} 2 or see --help"
                )
            value = rest.pop(0)
        found[flag.lstrip("-").replace("-", "_")] = read_value(value)
    return names, found


def only(command: str, name: str, context: typer.Context) -> Variant | CsvFile:
    """Return the one schedule of a command, with the builder's options from the remaining words."""
    names, options = split([name, *context.args])
    if len(names) != 1:
        raise ValueError(f"{command} takes one schedule, got {len(names)}: {' '.join(names)}; use compare for several")
    return wanted(names[0]).with_options(options)


def check_size(num_ranks: int, num_microbatches: int, *asked: Variant | CsvFile) -> None:
    """Raise ValueError for a program that would take minutes or more; a CSV file has a fixed size."""
    for one in (one for one in asked if isinstance(one, Variant)):
        factors = {"ranks": num_ranks, "microbatches": num_microbatches}
        factors |= {flag_of(name): value for name, value in one.options.items() if isinstance(value, int) and value > 1}
        if prod(factors.values()) > MAX_CELLS:
            size = " x ".join(f"{value} {name}" for name, value in factors.items())
            raise ValueError(f"{one}: {size} is more than {MAX_CELLS:,}; choose a smaller size")


def flag_of(option: str) -> str:
    """Return the command-line form of a builder's option."""
    return f"--{option.replace('_', '-')}"


def read_cost(text: str | None) -> Cost:
    """Read F=1,I=1,W=1,FB=2.5 and so on, exactly; B is I + W and FB is F + B unless given."""
    found: dict[str, int | Fraction] = {}
    for pair in text.split(",") if text else ():
        match = _PAIR.fullmatch(pair)
        if match is None or match[1] not in COST_KEYS:
            raise ValueError(
                f"--cost: {pair!r} is not a cost; write {', '.join(COST_KEYS)} = a number, such as F=1,FB=2.5"
            )
        if COST_KEYS[match[1]] in found:
            raise ValueError(f"--cost names {match[1]} twice; give it once")
        found[COST_KEYS[match[1]]] = _exact(pair, match[2])
    return Cost(**found) if found else UNIT_COST


def _exact(pair: str, text: str) -> int | Fraction:
    try:
        value = Fraction(text if _NUMBER.fullmatch(text) else "")
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--cost: {text!r} in {pair.strip()!r} is not a number; write 2, 2.5 or 5/2") from None
    return value.numerator if value.denominator == 1 else value


def _numbers_of(cost: Cost) -> dict[str, int | Fraction]:
    return {name: value for name in COST_KEYS.values() if (value := getattr(cost, name)) is not None}


def whole_ticks(cost: Cost) -> tuple[Cost, int]:
    """Return the costs in ticks of 1/n, and n, such that every cost is an integer."""
    costs = _numbers_of(cost)
    fine = lcm(*(Fraction(value).denominator for value in costs.values()))
    return Cost(**{name: int(value * fine) for name, value in costs.items()}), fine


def words_of(cost: Cost) -> str:
    """Return a cost in the form that `--cost` reads."""
    letters = {name: key for key, name in COST_KEYS.items()}
    return " ".join(f"{letters[name]}={number(value)}" for name, value in _numbers_of(cost).items())


def write(files: Mapping[str, Path | None], export: Callable[[str], str | bytes]) -> bool:
    """Write every form that has a path, and print each path; return whether there was one."""
    for form, path in files.items():
        if path is not None:
            found = export(form)
            path.write_bytes(found.encode() if isinstance(found, str) else found)
            print(f"wrote {path} ({path.stat().st_size:,} bytes)")
    return any(files.values())


def columns() -> int:
    """Return the width of the terminal in columns; 100 without one."""
    return shutil.get_terminal_size((100, 24)).columns


def export_program(program: Program, cost: Cost, form: str) -> str | bytes:
    """Return a program as csv, html, png, svg or perfetto."""
    if form == "csv":
        return to_torch_csv(program)
    if form != "html":
        return export_timeline(simulate(program, cost), form)
    ticks, fine = whole_ticks(cost)  # the page's sliders need integer ticks
    title = program.name if fine == 1 else f"{program.name}, ticks of 1/{fine}"
    recosted = simulate(program, ticks)
    named = Timeline(title, recosted.spans_by_rank, recosted.messages, costs=recosted.costs)
    return export_timeline(named, form, program.name)


def export_timeline(timeline: Timeline, form: str, title: str | None = None) -> str | bytes:
    """Return a timeline as html, png, svg or perfetto; `title`: of the page (default: the timeline's name)."""
    if form == "html":
        from dualpipe_lab.viz.embed import page, timeline_html

        return page(timeline_html(timeline), title or timeline.name)
    if form == "png":
        from dualpipe_lab.viz.plots import timeline_png

        return timeline_png(timeline)
    return timeline.to_svg() if form == "svg" else timeline.to_perfetto()
