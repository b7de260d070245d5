"""`Export`: settings of a framework for a plan, and what the framework has no setting for.

In: settings, sentences.  Out: text, and whether the settings say all of the plan; arguments are quoted for a shell.
A setting is written only if it means what the plan means; what is only nearly the same is a sentence.
"""

import json
from dataclasses import dataclass
from shlex import quote
from typing import Generic, TypeVar

from dualpipe_lab.plan.gpt_config import GptConfig
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.states import AnyModel, config_of
from dualpipe_lab.plan.traffic import check_traffic

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Export(Generic[Settings]):
    """Settings of a framework for a plan.

    Attributes:
        framework: whose settings they are.
        settings: arguments, or values by their names.
        missing: what the plan says and the settings do not, one sentence each.

    >>> print(Export("Megatron-LM", ["--bf16", "--seq-length", "8"], ("a schedule: it has another",)))
    --bf16
    --seq-length 8
    no setting of Megatron-LM: a schedule: it has another
    """

    framework: str
    settings: Settings
    missing: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether the settings say all that the plan says."""
        return not self.missing

    def __str__(self) -> str:
        text = json.dumps(self.settings, indent=2)
        if isinstance(self.settings, list):
            text = " ".join(map(quote, self.settings)).replace(" --", "\n--")
        return "\n".join([text, *(f"no setting of {self.framework}: {each}" for each in self.missing)])


def rows_of(plan: Plan, model: AnyModel, sequence_length: int, global_batch: int) -> int:
    """Return the sequences of a microbatch.

    Raises:
        ValueError: a plan that does not fit the model, or sequences that do not divide or have too many tokens.
    """
    plan.check(config_of(model), sequence_length)
    positions = model.num_positions if isinstance(model, GptConfig) else None
    if positions is not None and sequence_length > positions:
        raise ValueError(
            f"a sequence has at most as many tokens as the model has learned positions, got {sequence_length} tokens "
            f"and {positions}; use shorter sequences, or give the model more"
        )
    return check_traffic(plan, global_batch)


def has_order(plan: Plan, *order: str) -> bool:
    """Return whether the axes with several ranks have an order, outermost first.

    >>> has_order(Plan(dp=2, tp=2), "pp", "dp", "ep", "cp", "tp")
    True
    """
    sizes = plan.sizes
    return [axis for axis in plan.order if sizes[axis] > 1] == [axis for axis in order if sizes[axis] > 1]
