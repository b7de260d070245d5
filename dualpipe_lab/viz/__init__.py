"""Pictures that the library draws from what really happened.

Chapter: book/start/time.  In: timelines and step logs.  Out: drawings for pages, notebooks and papers.
  compare(simulated, measured)    one to three timelines on one axis: plays, recomputes, explains its critical path
  steps(...)                      messages between ranks, step by step: rings, collectives, all-to-all
  plot_timelines(...)             the same timelines by matplotlib, for papers
  Chart(...)                      lines over a number, such as a weight over the steps of a training
  Lanes(...)                      named rows of spans: what a rank computes beside what travels meanwhile
  Slices(...)                     which part of each tensor lives on which rank, and what the ranks send
  Mosaic(...)                     grids of cells: which queries see which keys, and who computes each pair
  Stacks(...)                     what every rank has to do, as pieces in a row, beside the mean
  Explorer(...)                   every schedule at many sizes, timed and ranked in the page
  TimelineWidget(...)             a timeline whose time, costs and selection Python reads and sets
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "compare": "comparison",
    "Comparison": "comparison",
    "steps": "steplog",
    "Steps": "steplog",
    "plot_timelines": "plots",
    "TimelineWidget": "widget",
    "Chart": "chart",
    "Lanes": "lanes",
    "Slices": "slices",
    "Mosaic": "mosaic",
    "Stacks": "stacks",
    "Explorer": "explorer",
}


def __getattr__(name: str) -> Any:
    # Lazily: the widget needs anywidget, plots need matplotlib, and neither should slow down a first import.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
