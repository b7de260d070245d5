"""The 36 bubble rates that the Zero Bubble paper has for its own profiled times, to the four digits it prints.

Chapter: book/whole/predictions.  A rate is what a rank waits of the longest span of any rank, from its own first action
to its own last one.
Source: Qi et al. 2023 (arXiv 2401.10241), tables 5 and 6: milliseconds of F, I (its B), W and of a message between
stages; rates of 1F1B, ZB-H1 and ZB-H2.
"""

from collections.abc import Iterator
from decimal import Decimal

from dualpipe_course.whole.published import Pair
from dualpipe_lab.pp import Cost, schedules, simulate

SCHEDULES = ("1f1b", "zero_bubble_h1", "zero_bubble_h2")
ROWS = [  # model, ranks, microbatches, four times in ms, three rates
    ("1.5B", 8, 24, "18.522", "18.086", "9.337", ".601", ".2431", ".1585", ".1083"),
    ("1.5B", 8, 32, "18.513", "18.086", "9.331", ".626", ".1985", ".1242", ".0837"),
    ("1.5B", 8, 64, "18.546", "18.097", "9.321", ".762", ".1240", ".0674", ".0444"),
    ("6.2B", 8, 24, "29.718", "29.444", "19.927", ".527", ".2347", ".1323", ".0698"),
    ("6.2B", 8, 32, "29.802", "29.428", "19.530", ".577", ".1898", ".1045", ".0559"),
    ("6.2B", 8, 64, "29.935", "29.621", "19.388", ".535", ".1091", ".0554", ".0294"),
    ("14.6B", 16, 48, "11.347", "11.248", "8.132", ".377", ".2552", ".1397", ".0672"),
    ("14.6B", 16, 64, "11.307", "11.254", "8.101", ".379", ".2082", ".1088", ".0516"),
    ("14.6B", 16, 128, "11.325", "11.308", "8.109", ".378", ".1251", ".0576", ".0266"),
    ("28.3B", 32, 96, "10.419", "10.207", "7.715", ".408", ".2646", ".1421", ".0641"),
    ("28.3B", 32, 128, "10.408", "10.204", "7.703", ".408", ".2168", ".1106", ".0490"),
    ("28.3B", 32, 256, "10.402", "10.248", "7.698", ".460", ".1352", ".0594", ".0257"),
]


def pairs(row: tuple[str | int, ...]) -> Iterator[Pair]:
    """The published and the simulated rate of a row's three schedules."""
    name, num_ranks, num_microbatches, *texts = row
    costs = [int(Decimal(text) * 1000) for text in texts[:4]]
    for schedule, text in zip(SCHEDULES, texts[4:], strict=True):
        found = rate(schedule, int(num_ranks), int(num_microbatches), *costs)
        yield Pair(f"{name} {schedule} m {num_microbatches}", float(text), found)


def rate(
    schedule: str, num_ranks: int, num_microbatches: int, forward: int, inputs: int, weights: int, message: int
) -> float:
    """The bubble rate of a schedule, given microseconds."""
    program = schedules.build(schedule, num_ranks, num_microbatches)
    timeline = simulate(program, Cost(forward, inputs, weights, latency=message))
    longest = max(spans[-1].end - spans[0].start for spans in timeline.spans_by_rank)
    return float((longest - num_microbatches * (forward + inputs + weights)) / longest)
