"""Schedules side by side under one set of rules: pairs for all or for none, a stated latency, one unit of memory.

    python benchmarks/contests.py             8 ranks, 20, 24 and 64 microbatches; nothing is measured, all is simulated
    python benchmarks/contests.py --search    also orders that a search finds (some minutes)

Costs are those of a rank's share of the model, 1/p: F, I and W take 1, a pair 2.5 where it may overlap and 3 otherwise.
Activations are counted in such shares too, copies of the weights in copies of a rank's share.  Latency is per message,
in forwards of a share.  `-`: a schedule has no pairs, not in a twin either.
"""

import argparse
from collections.abc import Iterator
from fractions import Fraction

from dualpipe_lab.pp import Cost, Score, Variant, score, search, variant
from dualpipe_lab.pp.schedules import named

RANKS = 8
MICROBATCHES = (20, 24, 64)
LATENCIES = (Fraction(0), Fraction(1, 40), Fraction(1, 2))
PAIR = Fraction(5, 2)
CONTESTANTS = (
    "gpipe",
    "1f1b",
    "interleaved:num_virtual_stages=2",
    "interleaved:num_virtual_stages=4",
    "zero_bubble_h1",
    "zero_bubble_h1:num_virtual_stages=2",
    "zero_bubble_h1:num_virtual_stages=4",
    "zero_bubble_h2",
    "zbv",
    "v_half",
    "v_min",
    "easy_dualpipe",
    "dualpipe",
    "dualpipev",
)
STAIRCASE = (
    ("1F1B", "1f1b", False),
    ("two directions alone", "easy_dualpipe", False),
    ("split backward alone", "zero_bubble_h1", False),
    ("two directions and split backward", "dualpipe", False),
    ("split backward on a V", "zbv", False),
    ("pairs, four stages on a rank", "interleaved:num_virtual_stages=4", True),
    ("pairs, two directions, split backward", "dualpipe", True),
    ("pairs, split backward, four stages on a rank", "zero_bubble_h1:num_virtual_stages=4", True),
)


def number(value: float) -> str:
    return f"{float(value):g}"


def contestant(name: str, pairs: bool) -> Variant:
    """Return a schedule as it runs under the rule: as its twin with pairs, if pairs are allowed and it has one."""
    one = variant(name)
    return one._replace(name=named(one.name).paired or one.name) if pairs else one


def contest(name: str, num_microbatches: int, pairs: bool, latency: Fraction) -> Score:
    """Return the numbers of one schedule under the rules."""
    program = contestant(name, pairs).build(RANKS, num_microbatches)
    return score(program, Cost(overlap=PAIR, latency=latency), pairs=pairs)


def staircase(num_microbatches: int = 20) -> Iterator[tuple[str, Score]]:
    """Yield what each idea brings, with free messages: its name and its numbers."""
    for words, name, pairs in STAIRCASE:
        yield words, contest(name, num_microbatches, pairs, latency=Fraction(0))


def table(num_microbatches: int) -> Iterator[str]:
    """Yield the lines of one table: makespan and bubble for every rule and latency."""
    yield f"\n{RANKS} ranks, {num_microbatches} microbatches"
    rules = [f"{'pairs' if pairs else 'none'}, {latency}" for pairs in (False, True) for latency in LATENCIES]
    yield f"{'':36}" + "".join(f"{rule:>16}" for rule in rules) + f"{'activations':>14}{'weights':>9}"
    for name in CONTESTANTS:
        scores = {(p, late): contest(name, num_microbatches, p, late) for p in (False, True) for late in LATENCIES}
        cells = [
            f"{number(one.makespan)} {one.bubble:.1%}" if one.pairs or not pairs else "-"
            for (pairs, _), one in scores.items()
        ]
        plain, paired = scores[False, LATENCIES[0]], scores[True, LATENCIES[0]]
        held = number(plain.peak) + (f" / {number(paired.peak)}" if paired.peak != plain.peak else "")
        yield f"{name:36}" + "".join(f"{cell:>16}" for cell in cells) + f"{held:>14}{number(plain.weights):>9}"


def searched(num_ranks: int, num_microbatches: int, memory: int, num_moves: int = 1000) -> Iterator[str]:
    """Yield, for every latency, the best fixed schedule with pairs, the best order found, and what no order beats."""
    yield f"\n{num_ranks} ranks, {num_microbatches} microbatches, room for {memory}; {num_moves} moves"
    for name in ("zbv", "easy_dualpipe"):
        for latency in LATENCIES:
            names = [name, "dualpipev" if name == "zbv" else "dualpipe"]
            cost = Cost(overlap=PAIR, latency=latency)
            found = search(num_ranks, num_microbatches, cost, memory, names=names, num_moves=num_moves)
            fixed = "none" if found.fixed is None else f"{found.fixed[1].name} {number(found.fixed[0])}"
            bound = f"bound {number(found.bound.ticks)}, gap {found.gap:.1%}"
            yield f"latency {latency!s:6}{fixed:18}found {number(found.makespan):8}{bound}"


def main() -> None:
    """Print the staircase and the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--search", action="store_true", help="also orders that a search finds")
    arguments = parser.parse_args()
    print(f"What each idea brings, {RANKS} ranks, 20 microbatches, free messages: makespan, activations, weights")
    for words, one in staircase():
        print(f"{words:46}{number(one.makespan):>8}{number(one.peak):>8}{number(one.weights):>4}")
    for num_microbatches in MICROBATCHES:
        print("\n".join(table(num_microbatches)))
    for size in ((4, 8, 5), (4, 12, 5)) if arguments.search else ():
        print("\n".join(searched(*size)))


if __name__ == "__main__":
    main()
