"""Exercises that the course no longer has, and the page to which the address of each leads.

In: the name of an exercise, or of its notebook.  Out: a page.  `progress`, `grade` and `fresh` know them.
"""

RETIRED = {
    "moving_experts-1": "book/ep/eplb",
    "moving_experts-2": "book/ep/eplb",
    "moving_experts-3": "book/ep/eplb",
}


def page_of(topic: str) -> str:
    """Return the page that took the place of a retired topic's exercises, or nothing for another topic.

    >>> page_of("moving_experts"), page_of("moving-experts"), page_of("eplb")
    ('book/ep/eplb', 'book/ep/eplb', '')
    """
    name = topic.replace("-", "_")
    return next((page for exercise, page in RETIRED.items() if exercise.rpartition("-")[0] == name), "")
