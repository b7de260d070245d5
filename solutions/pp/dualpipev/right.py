"""Right answers of another style to the exercise on DualPipeV."""

RIGHT = {
    "dualpipev-1": {
        "DualPipe's upper half, renumbered": """
import re

from mine.rows_dualpipe import dualpipe_rows


def dualpipev_rows(p, m):
    def unfolded(one):
        return f"{one[1]}{one[2]}{int(one[3]) % m}"

    return [re.sub(r"(\\d+)([FBIW])(\\d+)", unfolded, row) for row in dualpipe_rows(2 * p, 2 * m)[:p]]


def dualpipev_place(p):
    def place(stage, microbatch):
        return stage if stage < p else 2 * p - 1 - stage

    return place
""",
        "a table of the V": """
from mine import rows_dualpipe


def dualpipev_rows(p, m):
    legs = zip(range(p), reversed(range(p, 2 * p)))
    return [rows_dualpipe.named(rows_dualpipe.words(down, 2 * p, 2 * m), ((down, 0), (up, 0))) for down, up in legs]


def dualpipev_place(p):
    way = [*range(p), *range(p - 1, -1, -1)]
    return lambda stage, i: way[stage]
""",
    },
}
