"""`lab`: a plan as JSON values, which `Plan` reads again and `train.run` takes.

In: a plan.  Out: its fields by name; those with their default value may be left out.
"""

from typing import Any

from dualpipe_lab.plan.exports.export import Export
from dualpipe_lab.plan.plan import Plan


def lab(plan: Plan) -> Export[dict[str, Any]]:
    """Return a plan as JSON values: `Plan.from_description` reads them, and so does `Plan(**values)`.

    >>> plan = Plan(pp=2, schedule="zbv", num_microbatches=4)
    >>> Plan(**lab(plan).settings) == plan
    True
    """
    return Export("DualPipe Lab", plan.describe())
