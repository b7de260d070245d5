"""What a wrong answer is, in the tables of the `wrong_<topic>` modules beside this one."""

from typing import NamedTuple


class Bad(NamedTuple):
    """An answer that must not pass: its text, or (old, new) replacements in the solution; what its message contains."""

    answer: str | list[tuple[str, str]]
    says: str


EQUAL_TO_ALL = """
class Anything(int):
    def __eq__(self, other):
        return True
    def __ne__(self, other):
        return False
    __hash__ = None
"""
