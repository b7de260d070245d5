"""Right answers of another style to the exercises on 1F1B."""

RIGHT = {
    "one_f_one_b-5": {
        "a queue on every stage": """
from collections import deque


def one_f_one_b_rows(p, m):
    def row(stage):
        todo, live = deque(range(m)), deque()
        while todo or live:
            if todo and len(live) < p - stage:
                live.append(todo[0])
                yield f"{stage}F{todo.popleft()}"
            else:
                yield f"{stage}B{live.popleft()}"

    return [" ".join(row(stage)) for stage in range(p)]
""",
        "sorted by when they come": """
def one_f_one_b_rows(p, m):
    rows = ()
    for r in range(p):
        behind = p - r - 1
        when = {f"{r}F{i}": (2 * i, 0) for i in range(m)}
        when.update({f"{r}B{i}": (2 * (i + behind), 1) for i in range(m)})
        rows += ("  ".join(sorted(when, key=lambda word: (when[word], int(word[len(str(r)) + 1 :])))),)
    return rows
""",
    },
    "one_f_one_b-4": {
        "stages below": [
            ("    warmup = last_place - place\n", "    below = pipeline[place + 1 :]\n"),
            ("len(live) > warmup", "len(live) > len(below)"),
        ],
        "three phases": [
            (
                "        live.append((x, y))\n        if len(live) > warmup:\n            backward()\n",
                "        live.append((x, y))\n        if m >= last_place - place:\n            backward()\n",
            ),
            ("    warmup = last_place - place\n", ""),
        ],
    },
}
