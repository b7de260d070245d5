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
    "one_f_one_b-3": {
        "as text": '''
order = """
0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0F6 0B2 0F7 0B3 0F8 0B4 0F9 0B5 0B6 0B7 0B8 0B9
1F0 1F1 1F2 1F3 1B0 1F4 1B1 1F5 1B2 1F6 1B3 1F7 1B4 1F8 1B5 1F9 1B6 1B7 1B8 1B9
2F0 2F1 2F2 2B0 2F3 2B1 2F4 2B2 2F5 2B3 2F6 2B4 2F7 2B5 2F8 2B6 2F9 2B7 2B8 2B9
3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7 3F8 3B8 3F9 3B9
"""
''',
        "a queue of what is held": """
def row(rank, room):
    words, held = [], []
    for i in range(10):
        words.append(f"{rank}F{i}")
        held.append(i)
        if len(held) == room:
            words.append(f"{rank}B{held.pop(0)}")
    return " ".join(words + [f"{rank}B{i}" for i in held])


order = [row(rank, room) for rank, room in enumerate((5, 4, 3, 1))]
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
