"""A row with its messages."""

import re
from collections.abc import Callable

Place = Callable[[int, int], int]  # of a stage and a microbatch: the position that runs it


def actions(token: str) -> list[tuple[int, str, int]]:
    """Stage, kind and microbatch of each action of a token; a pair has two.

    >>> actions("0SEND_F3"), actions("(1F4;2B0)OVERLAP_F_B")
    ([(0, 'SEND_F', 3)], [(1, 'F', 4), (2, 'B', 0)])
    """
    parts = token[1 : token.index(")")].split(";") if token.startswith("(") else [token]
    found = [re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", part) for part in parts]
    return [(int(one[1]), one[2], int(one[3])) for one in found if one]


def kind_of(token: str) -> str:
    """The name under which a token is executed.

    >>> kind_of("0SEND_F3"), kind_of("1I0"), kind_of("(1F4;2B0)OVERLAP_F_B")
    ('SEND', 'I', 'OVERLAP_F_B')
    """
    return token.partition(")")[2] if token.startswith("(") else actions(token)[0][1].partition("_")[0]


def with_messages(row: str, me: int, place: Place, num_stages: int) -> str:
    """The row of position `me`: a receive just before the step that needs it, a send just after."""
    found: list[str] = []
    for token in row.split():
        before, after = [], []
        for stage, kind, i in actions(token):
            if kind == "W":  # adds to weights that are here
                continue
            way, source, target = ("F", stage - 1, stage + 1) if kind == "F" else ("B", stage + 1, stage - 1)
            if 0 <= source < num_stages and place(source, i) != me:
                before.append(f"{stage}RECV_{way}{i}")
            if 0 <= target < num_stages and place(target, i) != me:
                after.append(f"{stage}SEND_{way}{i}")
        found += [*before, token, *after]
    return " ".join(found)
