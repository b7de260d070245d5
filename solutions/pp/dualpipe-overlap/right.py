"""Right answers of another style to the exercises on DualPipe's overlap."""

RIGHT = {
    "dualpipe_overlap-2": {
        "zip_longest": """
from itertools import zip_longest


def backward_pieces(layers, dy, pair):
    for layer in layers[::-1]:
        part = layer.input_grad(dy).contiguous()
        handle = comm.all_reduce(part, group=pair, async_op=True)
        layer.weight_grad()
        yield None
        handle.wait()
        dy = part + dy
    yield dy


def in_turn(forward, backward):
    ended, results = object(), [None, None]
    for both in zip_longest(forward, backward, fillvalue=ended):
        results = [old if new is ended else new for old, new in zip(results, both)]
    return tuple(results)
""",
        "the rest in the end": """
def backward_pieces(layers, dy, pair):
    todo = list(layers)
    while todo:
        layer = todo.pop()
        total = layer.input_grad(dy)
        work = comm.all_reduce(total, group=pair, async_op=True)
        layer.weight_grad()
        yield
        work.wait()
        dy = total.add_(dy)
    yield dy


def in_turn(forward, backward):
    y = dx = None
    while True:
        try:
            y = next(forward)
        except StopIteration:
            return y, [dx, *backward][-1]
        try:
            dx = next(backward)
        except StopIteration:
            return [y, *forward][-1], dx
""",
    },
}
