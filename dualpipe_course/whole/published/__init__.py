"""What others measured or published, beside what the library estimates for it: rows, rules, machines.

Chapter: book/whole/predictions.  In: nothing.  Out: `Pair`s of a published and an estimated number.
  bubbles      the Zero Bubble paper's 36 bubble rates
  megatron     memory of Megatron's own tests
  simumax      memory and steps on 8 B200
  korthikanti  activations and steps of four GPTs on A100
  narayanan    steps of ten GPTs on up to 3,072 A100, and of ZeRO-3
  sailor       memory of 52 ranks on GH200, stage by stage
  mlperf       steps of Llama 3.1 405B
  vtrain       steps of four GPTs on up to 512 A100
  rivals       what four other tools answer to some of these rows
Each module says where its rows were read.
"""

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple


class Pair(NamedTuple):
    """A published number beside an estimated one; `is_point` for a row that a number was calibrated on."""

    name: str
    published: float
    estimated: float
    is_point: bool = False

    @property
    def error(self) -> float:
        """The relative error, above 0 where the estimate is too large."""
        return self.estimated / self.published - 1


def sizes_of(pairs: Iterable[Pair]) -> tuple[int, float, float]:
    """The number of pairs that nothing was calibrated on, the median and the worst of their errors' sizes.

    >>> sizes_of([Pair("a", 4, 5), Pair("b", 4, 4, is_point=True), Pair("c", 4, 3)])
    (2, 0.25, 0.25)
    """
    errors = [abs(pair.error) for pair in pairs if not pair.is_point]
    return len(errors), median(errors), max(errors)
