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
    "online_softmax-1": "book/cp/online-softmax",
    "online_softmax-2": "book/cp/online-softmax",
    "ring_attention-1": "book/cp/ring-attention",
    "ring_attention-2": "book/cp/ring-attention",
    "ring_attention-6": "book/cp/ring-attention",
    "all_to_all-1": "book/ep/all-to-all",
    "all_to_all-2": "book/ep/all-to-all",
    "smoe-1": "book/ep/smoe",
    "smoe-2": "book/ep/smoe",
}


def page_of(topic: str) -> str:
    """Return the page that took the place of a retired topic's exercises, or nothing for another topic.

    >>> page_of("moving_experts"), page_of("moving-experts"), page_of("eplb")
    ('book/ep/eplb', 'book/ep/eplb', '')
    """
    name = topic.replace("-", "_")
    return next((page for exercise, page in RETIRED.items() if exercise.rpartition("-")[0] == name), "")
