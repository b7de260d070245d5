"""`plan_of`: an answer as a plan that fits a model, or what is wrong with it."""

from typing import Any

from dualpipe_course.plain import plain
from dualpipe_course.wrong import Wrong
from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.plan import Plan


def plan_of(answer: object, config: LlamaConfig | V3MoEConfig, num_ranks: int, sequence_length: int) -> Plan:
    """Return the plan that an answer describes: a dict of a plan's fields, or a `Plan`.

    Raises:
        Wrong: it is no plan, is one of another number of ranks, or does not fit the model.

    >>> print(plan_of({"dp": 2.0, "tp": 2}, LlamaConfig(), 4, 16))
    dp 2 x tp 2 = 4 ranks, float32
    """
    fields: Any = answer.describe() if isinstance(answer, Plan) else answer
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise Wrong(
            f'this check takes the fields of a plan, such as {{"dp": {num_ranks}}}, got {type(answer).__name__}'
        )
    found = {name: plain(value) for name, value in fields.items()}
    if ... in found.values():
        raise Wrong("not answered yet: put your sizes in place of the dots")
    try:
        plan = Plan.from_description({name: _listed(value) for name, value in found.items()})
        plan.check(config, sequence_length, num_ranks)
    except (ValueError, TypeError) as error:
        raise Wrong(str(error)) from None
    return plan


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
