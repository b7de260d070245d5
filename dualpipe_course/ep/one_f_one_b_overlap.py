"""Exercises of "1F1B overlap": a layer in steps, a pair, a better order, a wait in the wrong place.

Chapter: book/ep/one-f-one-b-overlap.  Parts run beside one process, pairs and one host on the virtual clock; an order
is judged by exact simulation.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, in_words
from dualpipe_course.declared import Puzzle, Repair
from dualpipe_course.ep import stepped_runs as runs
from dualpipe_course.meter import Meter
from dualpipe_course.own.part import Alone, OnRanks, Part
from dualpipe_course.trial import on_ranks, partial_score
from dualpipe_course.wrong import Wrong
from dualpipe_lab.ep.overlap import (
    InvalidOrder,
    Order,
    check_pair,
    host_calls,
    lower_bound,
    one_f_one_b_overlap,
    simulate,
    ticks_of,
)
from dualpipe_lab.ep.overlap.order import parse_ops
from dualpipe_lab.launch.emulator import Link

if TYPE_CHECKING:
    from torch import Tensor

UNEVEN = ticks_of(comm=3, A_F=1, A_B=1, A_W=1, M_F=4, M_B=4, M_W=4)
V3_TICKS, TARGET, LAYERS = 36, 32, 2
FORWARD, BACKWARD = 1, 2  # tags
SLOW = Link(gbps=1e6, latency_ms=runs.TRAVEL_MS)  # every exchange takes as long as a piece of work, of any size
ROWS, TABLE, CROSSED = "rows", "words", "ranks begin in different order, tags tell rows apart"
ALONE = ((2,),)
DUALPIPE = (  # of 2 ranks and 4 microbatches
    "0F0 1F2 0F1 1B2 (1F3;0B0)OVERLAP_F_B 1B3 0I1 0W1",
    "0F2 1F0 0F3 1B0 (1F1;0B2)OVERLAP_F_B 1B1 0I3 0W3",
)
OLD, NEW = 0, 1  # microbatches; the old one is in stage 0, the new one in stage 1


def _in_steps(rank: int, world_size: int, counts: runs.Counts, num_layers: int, kind: str) -> Found:
    """A forward alone, one beside a backward, a backward alone."""
    from mine.steps import backward_of, forward_of, take_turns

    log: list[str] = []
    ranks, has_table = list(range(world_size)), kind == TABLE
    weights = [runs.small_weights(stage, rank, num_layers, has_table) for stage in (OLD, NEW)]
    steps = [runs.small_steps(one, rank, counts, ranks, log) for one in weights]
    x = [runs.small_input(microbatch, rank, counts, has_table) for microbatch in (OLD, NEW)]
    dy = [runs.small_dy(microbatch, rank, counts) for microbatch in (OLD, NEW)]
    meter = Meter()
    ((y, saved),) = take_turns(forward_of(steps[OLD], x[OLD], FORWARD))
    one, other = forward_of(steps[NEW], x[NEW], FORWARD), backward_of(steps[OLD], saved, dy[OLD], BACKWARD)
    if kind == CROSSED:
        for generator in (one, other) if rank % 2 else (other, one):
            next(generator)
    (new_y, saved), dx = take_turns(one, other)
    (new_dx,) = take_turns(backward_of(steps[NEW], saved, dy[NEW], BACKWARD))
    sent = meter.lap().bytes
    values = {"y": y, "y of the second": new_y, "dx": dx, "dx of the second": new_dx}
    if has_table and (dx is not None or new_dx is not None):
        return Found({}, refused="x are whole numbers, and backward_of returned a gradient of them; return None")
    if any(one is not None and one.requires_grad for one in values.values()):
        return Found({}, refused="what a generator returns hangs on a graph; hand on what is detached")
    values |= _gradients(weights[OLD].leaves, "first stage") | _gradients(weights[NEW].leaves, "second stage")
    return Found({name: Numbers.of(value) for name, value in values.items()}, costs={"sent": sent})


def _gradients(leaves: "Mapping[str, Tensor]", where: str) -> "dict[str, Tensor]":
    """None counts as zeros: nothing has come by."""
    import torch

    return {
        f"gradient of {name}, {where}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
    }


def _plain_steps(
    rank: int, world_size: int, counts: runs.Counts, num_layers: int, kind: str
) -> "dict[str, Tensor | None]":
    old, new = (runs.small_layers(one, one, counts, num_layers, kind == TABLE)[rank] for one in (OLD, NEW))
    found = {"y": old["y"], "y of the second": new["y"], "dx": old["dx"], "dx of the second": new["dx"]}
    for stage, one in (("first stage", old), ("second stage", new)):
        found |= {f"gradient of {name}, {stage}": value for name, value in one.items() if name not in ("y", "dx")}
    return found


def _rows_sent(world_size: int, counts: runs.Counts, num_layers: int, kind: str) -> list[Limit]:
    """Two microbatches, forward and backward: a row goes there and back."""
    away = [sum(row) + sum(other[r] for other in counts) - 2 * row[r] for r, row in enumerate(counts)]
    sent = [2 * 2 * num_layers * num * runs.WIDTH * 8 for num in away]
    words = "rank {rank} sent {found} bytes, the rows of two forwards and two backwards are {most}"
    return [Limit("sent", sent, words, least=sent, scope="each")]


def _stops(rank: int, world_size: int, counts: runs.Counts) -> Found:
    """Where the generators stand aside: pieces of work that are over, bytes that have begun to travel, milliseconds."""
    from mine.steps import backward_of, forward_of, take_turns

    from dualpipe_lab import comm

    log: list[str] = []
    weights = runs.small_weights(OLD, rank, 1, False)
    steps = runs.small_steps(weights, rank, counts, list(range(world_size)), log, runs.WORK_MS)
    x, dy = runs.small_input(OLD, rank, counts, False), runs.small_dy(OLD, rank, counts)
    ((_, saved),) = take_turns(forward_of(steps, x, FORWARD))
    comm.barrier()
    forward = _followed(forward_of(steps, x, FORWARD), log)
    comm.barrier()
    backward = _followed(backward_of(steps, saved, dy, BACKWARD), log)
    return Found({"forward_of": Numbers.of(forward), "backward_of": Numbers.of(backward)})


def _followed(generator: Generator[None, None, Any], log: list[str]) -> list[list[float]]:
    from dualpipe_lab.launch.context import now

    meter, pieces, start, stops = Meter(), len(log), now(), []
    sent = 0
    for _ in generator:
        sent += meter.lap().bytes
        stops.append([float(len(log) - pieces), float(sent), (now() - start) / 1e6])
    return stops


def _right_stops(rank: int, world_size: int, counts: runs.Counts) -> "dict[str, Tensor | None]":
    """Gradients go to the experts as tokens do, and come back as results do: both ways stand aside alike."""
    import torch

    leaving, arriving = sum(counts[rank]) - counts[rank][rank], sum(row[rank] for row in counts) - counts[rank][rank]
    sent = [8 * runs.WIDTH * leaving, 8 * runs.WIDTH * (leaving + arriving)]
    waited = runs.TRAVEL_MS if arriving else 0
    stops = torch.tensor([[1, sent[0], runs.WORK_MS], [2, sent[1], 2 * runs.WORK_MS + waited]], dtype=torch.float64)
    return {"forward_of": stops, "backward_of": stops}


def _why_not_there(off: Off) -> str:
    if off.found is None or off.has_other_shape:
        num = 0 if off.found is None else off.found.shape[0]
        return (
            f"{off.name} stands aside {num} time(s) for two exchanges: once for each, on every rank, also where no row "
            "leaves or arrives"
        )
    stop = off.place // 3
    found, right = off.found.row(stop), off.expected.row(stop)
    said = [f"{int(p)} piece(s) of work, {int(b)} bytes sent, {t:g} ms" for p, b, t in (found, right)]
    why = ""
    if found[:2] == right[:2] and found[2] > right[2]:
        why = "; it has waited for the rows, and there is nothing left to do beside them"
    elif found[1] < right[1]:
        why = "; nobody else can work beside an exchange that has not begun"
    return f"{off.name} stands aside for exchange {stop + 1} after {said[0]}; it should be {said[1]}{why}"


def _turns(lengths: tuple[int, ...]) -> str:
    """Generators that stand aside so many times."""
    from mine.steps import take_turns

    log: list[str] = []

    def generator(number: int, length: int) -> Generator[None, None, Any]:
        for stop in range(length):
            log.append(f"{number}.{stop}")
            yield
        log.append(f"{number}.end")
        return number or None

    found = take_turns(*(generator(number, length) for number, length in enumerate(lengths)))
    names = [[*map(str, range(length)), "end"] for length in lengths]
    most = max(map(len, names), default=0)
    wanted = [f"{n}.{own[turn]}" for turn in range(most) for n, own in enumerate(names) if turn < len(own)]
    if log != wanted:
        return f"they went on in the order {' '.join(log)}, in turn it is {' '.join(wanted)}"
    values = [number or None for number in range(len(lengths))]
    return "" if list(found) == values else f"it returned {found}, what the generators return is {values}"


def _why_not_in_steps(off: Off) -> str:
    if off.found is not None and not any(off.found.flat) and any(off.expected.flat):
        return f"{off.name} is zero: does everything in the carry bring its gradient back to the step that made it?"
    if off.name.startswith("dx") and not off.has_other_shape:
        return f"{in_words(off)}. A gradient comes back by two ways: through the exchange, and along the carry"
    return in_words(off)


def _paired(rank: int, world_size: int, counts: runs.Counts) -> Found:
    """A pair of two stages, then halves of a backward, then a pair within one stage."""
    from mine.later import SplitStage
    from mine.pair import PairedStage

    from dualpipe_lab import comm
    from dualpipe_lab.launch.context import now

    log: list[str] = []
    weights = [runs.small_weights(stage, rank, 1, False) for stage in (OLD, NEW)]
    old, new = (
        PairedStage(
            runs.small_steps(one, rank, counts, list(range(world_size)), log, runs.WORK_MS, f"{stage}"),
            list(one.leaves.values()),
        )
        for stage, one in zip(("old ", "new "), weights, strict=True)
    )
    if not isinstance(old, SplitStage):
        return Found({}, refused="PairedStage is no SplitStage, and the words I and W need one")
    x = [runs.small_input(microbatch, rank, counts, False) for microbatch in range(4)]
    dy = [runs.small_dy(microbatch, rank, counts) for microbatch in range(4)]
    y, saved = old.forward(x[0])
    comm.barrier()
    log.clear()
    start = now()
    new_y, new_saved, dx = new.pair(x[1], old, saved, dy[0])
    taken, order = (now() - start) / 1e6, _order(log)
    values = {"y": y, "dx of the pair": dx, "y of the pair": new_y}
    values |= _gradients(weights[OLD].leaves, "of the pair's backward")
    values = {name: Numbers.of(value) for name, value in values.items()}
    new_dx, left = new.input_grad(new_saved, dy[1])
    if early := [name for name, leaf in weights[NEW].leaves.items() if leaf.grad is not None]:
        return Found({}, refused=f"input_grad has made the gradient of {early[0]} already, which is the work of W")
    new.weight_grads(left)
    _, saved = old.forward(x[2])
    last_y, saved, third_dx = old.pair(x[3], old, saved, dy[2])
    last_dx = old.backward(saved, dy[3])
    more = {"dx of I": new_dx, "dx of a pair within a stage": third_dx}
    more |= {"y of a pair within a stage": last_y, "dx after it": last_dx}
    more |= _gradients(weights[NEW].leaves, "after I and W") | _gradients(weights[OLD].leaves, "after three backwards")
    values |= {name: Numbers.of(value) for name, value in more.items()}
    return Found(values, costs={"ms": taken}, refused=_differs(order))


def _order(log: Sequence[str]) -> "Tensor":
    """Pieces of work as numbers, for a comparison of ranks."""
    import torch

    return torch.tensor([int.from_bytes(piece.replace("old ", "").replace("new ", "").encode()) for piece in log])


def _differs(order: "Tensor") -> str:
    """Words if this rank's order is not that of the first."""
    from dualpipe_lab import comm

    first = order.clone()
    comm.broadcast(first, 0)
    return "" if first.equal(order) else "the order of the pair's pieces is not that of rank 0"


def _plain_pair(rank: int, world_size: int, counts: runs.Counts) -> "dict[str, Tensor | None]":
    stage_of = {0: OLD, 1: NEW, 2: OLD, 3: OLD}
    made = [runs.small_layers(stage_of[mb], mb, counts, 1, False) for mb in range(4)]
    one = [ranks[rank] for ranks in made]
    found = {"y": one[0]["y"], "dx of the pair": one[0]["dx"], "y of the pair": one[1]["y"]}
    found |= _named(one[0], "of the pair's backward")
    found |= {"dx of I": one[1]["dx"], "dx of a pair within a stage": one[2]["dx"]}
    found |= {"y of a pair within a stage": one[3]["y"], "dx after it": one[3]["dx"]}
    found |= _named(one[1], "after I and W")
    return found | _named(runs.added(made[0], made[2], made[3])[rank], "after three backwards")


def _named(values: runs.Named, where: str) -> runs.Named:
    return {f"gradient of {name}, {where}": value for name, value in values.items() if name not in ("y", "dx")}


def _quick_enough(world_size: int, counts: runs.Counts) -> list[Limit]:
    """Six pieces of work hide four exchanges of the same length: the pair takes as long as its work."""
    work = 6 * runs.WORK_MS
    words = (
        f"the pair took {{found:g}} ms on rank {{rank}}: its six pieces of work take {work} and can hide the four "
        f"exchanges of {runs.TRAVEL_MS}; one after the other they take {work + 4 * runs.TRAVEL_MS}. Let the two "
        "generators take turns"
    )
    return [Limit("ms", 1.15 * work, words, scope="largest", shows=True)]


def _in_layers(rank: int, world_size: int, choice: str) -> Found:
    """The layer of `layer_steps`: a forward alone, a pair, I and W."""
    from mine.pair import PairedStage, layer_steps

    ranks = list(range(world_size))
    own = [runs.part_of(runs.whole_weights(stage), rank, world_size, choice) for stage in (OLD, NEW)]
    old, new = (
        PairedStage(layer_steps(w, runs.HEADS, runs.EXPERTS, runs.ROUTE, ranks), list(runs.leaves_of(w).values()))
        for w in own
    )
    y, saved = old.forward(runs.layer_input(OLD, rank))
    new_y, new_saved, dx = new.pair(runs.layer_input(NEW, rank), old, saved, runs.layer_dy(OLD, rank))
    new_dx, left = new.input_grad(new_saved, runs.layer_dy(NEW, rank))
    new.weight_grads(left)
    values = {"y": y, "y of the pair": new_y, "dx of the pair": dx, "dx of I": new_dx}
    for w, where in zip(own, ("of the pair's backward", "after I and W"), strict=True):
        values |= _gradients(runs.leaves_of(w), where)
    return Found({name: Numbers.of(value) for name, value in values.items()})


def _plain_layers(rank: int, world_size: int, choice: str) -> "dict[str, Tensor | None]":
    old, new = (runs.expert_layer(one, one, world_size, choice)[rank] for one in (OLD, NEW))
    found = {"y": old["y"], "y of the pair": new["y"], "dx of the pair": old["dx"], "dx of I": new["dx"]}
    return found | _named(old, "of the pair's backward") | _named(new, "after I and W")


def _in_a_row(rank: int, world_size: int, rows: Sequence[str]) -> Found:
    """Rows with pairs, of stages of one and of two layers; half of the microbatches go from rank 1 to rank 0."""
    from mine.execute import execute
    from mine.pair import PairedStage
    from mine.row_messages import with_messages

    def place(stage: int, microbatch: int) -> int:
        return stage if microbatch < 2 else 1 - stage

    weights = [runs.small_weights(stage, rank, 1 + stage, False) for stage in range(2)]
    stages = {
        stage: PairedStage(runs.small_steps(w, rank, ALONE, [rank], []), list(w.leaves.values()))
        for stage, w in enumerate(weights)
    }
    inputs = [runs.small_input(microbatch, 0, ALONE, False) for microbatch in range(4)]
    dys = [runs.small_dy(microbatch, 0, ALONE) for microbatch in range(4)]
    row = with_messages(rows[rank], rank, place, 2)
    losses = execute(row, stages, place, 2, inputs, lambda y, i: (y * dys[i]).sum())
    values = {f"loss of microbatch {i}": losses.get(i) for i in range(4) if place(1, i) == rank}
    for stage, w in enumerate(weights):
        values |= _gradients(w.leaves, f"stage {stage}")
    return Found({name: Numbers.of(value) for name, value in values.items()})


def _plain_row(rank: int, world_size: int, rows: Sequence[str]) -> "dict[str, Tensor | None]":
    weights = [[runs.small_weights(stage, one, 1 + stage, False) for stage in range(2)] for one in range(world_size)]
    losses = []
    for microbatch in range(4):
        x = runs.small_input(microbatch, 0, ALONE, False)
        for stage in range(2):
            one = stage if microbatch < 2 else 1 - stage
            x = runs.small_alone(weights[one][stage], x)
        losses.append((x * runs.small_dy(microbatch, 0, ALONE)).sum())
    sum(losses).backward()
    found: dict[str, Tensor | None] = {}
    for microbatch, loss in enumerate(losses):
        # the names are those of both ranks, in one order; of the other rank's losses this one has nothing to compare
        found[f"loss of microbatch {microbatch}"] = loss.detach() if (microbatch < 2) == (rank == 1) else None
    for stage, w in enumerate(weights[rank]):
        found |= {f"gradient of {name}, stage {stage}": leaf.grad for name, leaf in w.leaves.items()}
    return found


def _why_not_paired(off: Off) -> str:
    if off.name.endswith("of the pair's backward") and off.found is not None and not any(off.found.flat):
        return f"{off.name} is zero after the pair, whose backward is a whole B: nothing is left for a W"
    return in_words(off)


def _check_report(report: str, expected: float, case: str) -> None:
    try:
        taken = float(report)
    except ValueError:
        raise Wrong(f"{case}: {report}") from None
    if taken > expected:
        raise Wrong(
            f"{case}: the host takes {taken:g} ms; {expected:g} are enough. "
            "Where does it wait for an all-to-all whose rows are not needed yet?"
        )


def _pair(answer: object) -> Order:
    if not isinstance(answer, (list, tuple)) or [type(row) for row in answer] != [str, str]:
        raise Wrong("this check takes two rows of text: the operations of work, then the all-to-alls")
    try:
        order = Order.parse("yours", answer[0], answer[1], forward=1, backward=0)
        check_pair(order, LAYERS)
        host_calls(order)
    except InvalidOrder as error:
        raise Wrong(str(error).removeprefix("yours: ")) from None
    except ValueError as error:
        raise Wrong(str(error)) from None
    return order


def _needs_of(order: Order) -> dict[str, str]:
    """For each operation the one of this order that it takes the result of, as text."""
    makers = order.makers()
    ops = (*order.compute, *order.comm)
    return {str(op): str(makers[op.needs]) for op in ops if op.needs in makers}


def _watched(
    rank: int, world_size: int, fn: Callable[..., Any], program: Sequence[str], needs: Mapping[str, str], ms: float
) -> str:
    """Let a host work on this rank; return what it did wrong, or its time in milliseconds."""
    import dualpipe_lab as lab

    done = _Done(dict(needs), ms)
    try:
        fn(list(program), done.do, done.issue, dict(needs))
    except LookupError as error:
        return str(error)
    is_comm = {op: parse_ops(op)[0].is_comm for op in program}
    if [op for op in program if not is_comm[op]] != done.ran or [op for op in program if is_comm[op]] != done.issued:
        return "not every operation ran once, in the order of the program"
    if unwaited := [op for op in done.issued if op not in done.waited]:
        return f"{unwaited[0]} was never waited for: its rows may not have come when the function returns"
    return f"{lab.now() / 1e6:g}"


class _Done:
    """What a host has done, and the functions that it is given."""

    def __init__(self, needs: Mapping[str, str], ms: float) -> None:
        self._needs, self._ms = needs, ms
        self.ran: list[str] = []
        self.issued: list[str] = []
        self.waited: set[str] = set()

    def do(self, op: str) -> None:
        import dualpipe_lab as lab

        self._check(op)
        lab.compute(self._ms)
        self.ran.append(op)

    def issue(self, op: str) -> "_Journey":
        self._check(op)
        self.issued.append(op)
        return _Journey(op, self.waited)

    def _check(self, op: str) -> None:
        needed = self._needs.get(op)
        if needed is not None and needed not in self.waited and needed not in self.ran:
            raise LookupError(f"{op} takes what {needed} makes, and {needed} is not over")


class _Journey:
    """An all-to-all under way."""

    def __init__(self, op: str, waited: set[str]) -> None:
        import torch

        from dualpipe_lab import comm

        rows = torch.zeros(comm.get_world_size(), dtype=torch.float64)
        self._op, self._waited = op, waited
        self._work = comm.all_to_all_single(rows, rows + 1, async_op=True)

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._waited.add(self._op)


def _judge_short_attention(answer: object) -> str:
    order = _pair(answer)
    streams = simulate(order, UNEVEN)
    if streams.makespan > TARGET:
        waits = ", ".join(f"{op} for {ticks}" for op, ticks in streams.waits())
        raise Wrong(
            f"a legal order of {streams.makespan} ticks, {TARGET} are wanted; DeepSeek's order takes {V3_TICKS}. "
            f"Work waits at {waits}",
            score=partial_score(int(streams.makespan), V3_TICKS, TARGET),
        )
    least = lower_bound(order, UNEVEN)
    return f"{streams.makespan} ticks; the longer sum is {least}, DeepSeek's order takes {V3_TICKS}"


def _judge_patient(fn: Callable[..., Any]) -> str:
    work = 10
    for num_layers, travel in ((1, 10), (3, 10), (1, 12), (1, 15)):
        link = Link(gbps=8 * 8 / (travel * 1e6))  # one number from each rank to the other
        order = one_f_one_b_overlap(num_layers)
        program = [str(op) for verb, op in host_calls(order) if verb != "wait"]
        case = f"{num_layers} layer(s), work of {work} ms, all-to-alls of {travel} ms"
        out = on_ranks(_watched, 2, fn, program, _needs_of(order), work, case=case, clock="virtual", link=link)
        expected = simulate(order, ticks_of(work, travel)).makespan
        _check_report(out[0], float(expected), case)
    return "60 ms for one layer and 180 for three, the work alone; with slower links no wait comes before its need"


steps = Part(
    "one_f_one_b_overlap-5",
    "steps",
    "A layer in steps",
    "Write Compute, Travel, forward_of, backward_of and take_turns: a layer that stands aside while rows travel.",
    names=("Compute", "Travel", "forward_of", "backward_of", "take_turns"),
    trials=(
        Alone(_turns, (((1,),), ((1, 1),), ((2, 0, 3),), ((),)), "take_turns, generators that stand aside {} times"),
        OnRanks(
            _in_steps,
            (
                (1, ((2,),), 1, ROWS),
                (2, ((1, 2), (3, 1)), 1, ROWS),
                (2, ((0, 3), (0, 0)), 1, ROWS),
                (2, ((2, 1), (1, 2)), 2, TABLE),
                (3, ((0, 2, 1), (1, 0, 0), (0, 1, 3)), 1, CROSSED),
            ),
            _plain_steps,
            "{0} rank(s) that exchange {1}, {2} layer(s), {3}",
            _rows_sent,
            _why_not_in_steps,
        ),
        OnRanks(
            _stops,
            ((2, ((1, 2), (2, 1))), (3, ((0, 2, 0), (1, 0, 0), (0, 0, 2)))),
            _right_stops,
            "{0} ranks that exchange {1}, each message takes 20 ms",
            why=_why_not_there,
            options={"clock": "virtual", "link": SLOW},
        ),
    ),
    right="11 cases on 1 to 3 ranks: gradients of one process, and each exchange stands aside as soon as it has begun",
    minutes=90,
    points=5,
    hints=(
        "Run take_turns on generators of your own first: next(generator) until StopIteration, whose value is what the "
        "generator returned. Then forward_of, without a backward: start_exchange, yield, wait.",
        "Each Compute is a graph of its own: detach x and every floating tensor of the carry, requires_grad_(), and "
        "keep x, carry, y and the new carry. A residual travels in the carry, and its gradient in a dictionary of the "
        "same names; whole numbers have none.",
        "Backward: outputs are y with dx and made[name] with its gradient, where there is one and the output requires "
        "grad; torch.autograd.backward(outputs, gradients); then dx = x.grad, and the gradients of the carry are those "
        "of its leaves. At a Travel: start_exchange(dx, receives, sends, ranks, tag), yield, wait.",
    ),
)

pair = Part(
    "one_f_one_b_overlap-6",
    "pair",
    "A forward beside a backward",
    "Write PairedStage and layer_steps: a layer of experts whose forward hides the exchanges of another's backward.",
    names=("PairedStage", "layer_steps"),
    trials=(
        OnRanks(
            _paired,
            ((1, ((2,),)), (2, ((1, 2), (2, 1))), (3, ((0, 3, 1), (0, 0, 0), (0, 1, 2)))),
            _plain_pair,
            "{0} rank(s) that exchange {1}, each message takes 20 ms",
            _quick_enough,
            _why_not_paired,
            options={"clock": "virtual", "link": SLOW},
        ),
        OnRanks(
            _in_layers,
            ((1, runs.EVEN), (2, runs.EVEN), (2, runs.LONE), (4, runs.LONE)),
            _plain_layers,
            "layer_steps on {0} rank(s), {1}",
            why=_why_not_paired,
        ),
        OnRanks(_in_a_row, ((2, DUALPIPE),), _plain_row, "a row with pairs, by your execute, on {0} ranks"),
    ),
    right="8 cases on 1 to 4 ranks: gradients of one process, and a pair as long as its work",
    minutes=60,
    points=5,
    hints=(
        "forward is one generator, backward another, pair both of them: your take_turns runs them, and its list has "
        "what they return. input_grad and weight_grads come from SplitStage.",
        "layer_steps has five steps: attention and all up to the rows that leave, there, the experts, back, the sum. "
        "The residual with the MLP, the weights and the plan travel in the carry; the sizes of an exchange are those "
        "of the plan, and on the way back sends and receives change places.",
        "def run_pair(run, token): (of_f, _, i), (of_b, _, j) = actions(token); x = run.before_f(of_f, i); saved, dy = "
        "run.before_b(of_b, j); y, kept, dx = run.stages[of_f].pair(x, run.stages[of_b], saved, dy); then after_f and "
        "after_b. KINDS.update(OVERLAP_F_B=run_pair) stands at the end of the file.",
    ),
)

short_attention = Puzzle(
    "one_f_one_b_overlap-3",
    "Short attention",
    "Order the operations of a pair of two layers so that it ends by tick 32.",
    judge=_judge_short_attention,
    minutes=20,
    points=3,
    hints=(
        "Print simulate(order, ticks).waits(). What could have run while A_B waited for D_B?",
        "A 4 is a long window: put M_F between M_B and M_W, and D_B has M_F and M_W.",
        "C_F is needed by A_F of the next layer. Let it travel behind M_W, and keep A_W for a gap that is left.",
    ),
)

patient = Repair(
    "one_f_one_b_overlap-4",
    "Asynchronous in name",
    "Repair a host whose asynchronous all-to-alls hide nothing.",
    judge=_judge_patient,
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "Results are right. Add up the times of work and of all-to-alls: what does the host take?",
        "Keep what issue(op) returns. Who needs its rows, and when?",
        "Wait in front of do(op) for needs.get(op), if that was issued and not waited for. What is left at the end?",
    ),
)
