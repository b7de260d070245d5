"""Pictures in notebooks: IPython's HTML formatter shows timelines and plans as drawings of `viz`.

In: the running IPython shell.  Out: registered formatters.
`Timeline` and `Plan` are data and import nothing that draws.  The root package calls `attach` when it is imported in
IPython.  The drawing code is imported when the first picture is shown.
Elsewhere: IPython's `BaseFormatter.for_type_by_name`, which does not import the type that it names.
"""

import sys
from typing import Any


def attach() -> None:
    """Register the formatters with the running IPython shell; do nothing without one."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    if shell is not None:
        formatter = shell.display_formatter.formatters["text/html"]
        formatter.for_type_by_name("dualpipe_lab.timeline.model", "Timeline", _timeline_html)
        formatter.for_type_by_name("dualpipe_lab.plan.plan", "Plan", _plan_html)


def _timeline_html(timeline: Any) -> str:
    from dualpipe_lab.viz.embed import timeline_html  # read when something is shown

    return timeline_html(timeline)


def _plan_html(plan: Any) -> str:
    from html import escape

    from dualpipe_lab.viz.grid import grid

    return f"<p>{escape(str(plan))}</p>{grid(plan)._repr_html_()}"
