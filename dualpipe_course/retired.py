"""Exercises that the course no longer has, and the page to which the address of each leads.

In: the name of an exercise, or of its notebook.  Out: a page.  `progress`, `grade` and `fresh` know them.
"""

RETIRED = {
    "moving_experts-1": "book/ep/eplb",
    "moving_experts-2": "book/ep/eplb",
    "moving_experts-3": "book/ep/eplb",
    "ring_softmax-3": "book/cp/ring-softmax",
    "training-4": "book/whole/training",
    "museum-4": "book/whole/museum",
    "sums-4": "book/whole/sums",
    "zero_1-2": "book/dp/zero-1",
    "links-3": "book/whole/links",
    "placing-3": "book/hosts/placing",
    "sums-3": "book/whole/sums",
    "training-3": "book/whole/training",
    "zero_2-4": "book/dp/zero-2",
    "deepseek-3": "book/whole/deepseek",
    "cuts-3": "book/whole/cuts",
    "memory-1": "book/start/memory",
    "memory-2": "book/start/memory",
    "ranks-1": "book/start/ranks-and-messages",
    "ranks-2": "book/start/ranks-and-messages",
    "data_parallel-1": "book/dp/data-parallel",
    "data_parallel-2": "book/dp/data-parallel",
    "dp_gradients-1": "book/dp/dp-gradients",
    "dp_gradients-2": "book/dp/dp-gradients",
    "speed-1": "book/start/speed",
}


def page_of(topic: str) -> str:
    """Return the page that took the place of a retired topic's exercises, or nothing for another topic.

    >>> page_of("moving_experts"), page_of("moving-experts"), page_of("eplb")
    ('book/ep/eplb', 'book/ep/eplb', '')
    """
    name = topic.replace("-", "_")
    return next((page for exercise, page in RETIRED.items() if exercise.rpartition("-")[0] == name), "")
