"""Exercises of "Pipelines that are not a line": negatives and bytes, yes or no, a gradient that is lost.

Chapter: book/pp/two-towers.  Gradients are judged against one process in float64, messages by the ledger.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, Unchanged, compare_on_ranks, in_words
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.switched_off import AUTOGRAD, Without

NAMES = ("negatives", "bytes gathered", "bytes of two matrices", "negatives of 8 microbatches", "bytes sent back")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        127: "the other 7 ranks' pairs are negatives too",
        1024: "one of these is the image's own caption",
        4095: "only the pairs of one microbatch meet, 128 on each rank",
    },
    {
        262_144: "a rank sends its own features to each of 7 others",
        2_097_152: "a rank's own part does not travel: 7/8 of the whole does",
        917_504: "features of images and of texts are gathered: 2 d numbers per pair",
        7_340_032: "gathered are the pairs of one microbatch",
    },
    {
        524_288: "there are two matrices, one for images and one for texts",
        8_388_608: "a rank has the rows of its own 128 pairs, not of all 1,024",
        131_072: "the columns are the pairs of all 8 ranks",
        2_097_152: "a number in float32 has 4 bytes",
    },
    {
        1023: "a microbatch has 64 pairs per rank now",
        2047: "more microbatches of the same batch are smaller ones",
        512: "one of these is the image's own caption",
    },
    {
        1_393_664: "integers have no gradient",
        1_261_568: "`image` rides along, and its gradient has to come back to its tower",
        131_072: "the gradient of x comes back, too",
    },
)
WIDTH, NUMBER = 3, 8  # features of the second exercise, bytes of a float64
LIBRARY = ("dualpipe_lab.models.contrastive:contrastive_loss", "dualpipe_lab.models.contrastive:_Contrastive")
CUTS = ((5, 6), (1, 5, 5), (6, 1, 4), (3, 3, 2, 3), (2, 4, 1, 1, 3))


_BYTES = "the ranks sent {found:,} bytes; a gather of the texts, its way back and one number of each rank need {most:,}"


def _pairwise(rank: int, world_size: int, fn: Callable[..., Any], num_pairs: int) -> Found:
    import torch
    from torch.nn.functional import logsigmoid

    generator = torch.Generator().manual_seed(num_pairs)
    both = torch.randn(2, world_size * num_pairs, WIDTH, generator=generator, dtype=torch.float64)
    a, c = torch.nn.functional.normalize(both, dim=-1)
    whole = [value.clone().requires_grad_() for value in (a, c, torch.tensor(3.0, dtype=a.dtype))]
    signs = 2 * torch.eye(len(a), dtype=a.dtype) - 1
    loss = -logsigmoid(signs * whole[2] * (whole[0] @ whole[1].t())).sum() / len(a)
    d_a, d_c, d_scale = torch.autograd.grad(loss, whole)  # before the answer, for which autograd is switched off
    own = slice(rank * num_pairs, (rank + 1) * num_pairs)
    expected = {"da": d_a[own], "dc": d_c[own], "dscale": d_scale.reshape(1)}
    given = [a[own].clone(), c[own].clone(), whole[2].detach().clone()]
    unchanged = Unchanged(a=given[0], c=given[1], scale=given[2])
    found = fn(*given)
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise TypeError("return three tensors: the gradients of a, c and scale")
    return Found(
        {name: Numbers.of(_tensor(value, name)) for name, value in zip(expected, found, strict=True)},
        {name: Numbers.of(value) for name, value in expected.items()},
        changed="" if unchanged.first() is None else f"the argument {unchanged.first()} has changed; work on a copy",
    )


def _tensor(value: Any, name: str) -> Any:
    """The gradient as a tensor; that of the scale in one form."""
    import torch

    value = torch.as_tensor(value, dtype=torch.float64)
    return value.reshape(1) if name == "dscale" and value.numel() == 1 else value


def _chain(rank: int, world_size: int, fn: Callable[..., Any], sizes: Sequence[int] | None) -> Found:
    """Run a chain of stages forward and, with the learner's function, backward."""
    import torch

    from dualpipe_lab.models.clip import ClipConfig, clip_layers, clip_loss, clip_stages

    torch.manual_seed(4)
    if sizes is None:
        return _one_stage(fn)
    config = ClipConfig(image_layers=4, text_layers=3)
    batch = {
        "pixels": torch.randn(3, config.image_size, config.image_size, dtype=torch.float64),
        "ids": torch.randint(config.vocabulary_size, (3, config.text_length)),
    }
    layers, reference = clip_layers(config), clip_layers(config)
    runs, payload = [], batch
    for stage in clip_stages(layers, sizes):
        inputs = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in payload.items()}
        payload = stage(**inputs)
        runs.append((inputs, payload))
    last = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in payload.items()}
    clip_loss()(last, None).backward()
    grads = {name: x.grad for name, x in last.items() if x.is_floating_point()}
    for stage, (inputs, outputs) in reversed(list(enumerate(runs))):
        grads = fn(
            inputs, outputs, {name: grads[name].clone() for name in outputs if outputs[name].is_floating_point()}
        )
        if problem := _why_not_gradients(grads, inputs):
            return Found({}, {}, refused=f"stage {stage}: {problem}")
    for layer in reference:
        batch = layer(batch)
    clip_loss()(batch, None).backward()
    pairs = zip(layers, reference, strict=True)
    found: dict[str, Numbers | None] = {}
    expected: dict[str, Numbers | None] = {}
    for number, (ours, theirs) in enumerate(pairs):
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            found[f"{number}.{name}"], expected[f"{number}.{name}"] = Numbers.of(p.grad), Numbers.of(q.grad)
    return Found(found, expected)


def _one_stage(fn: Callable[..., Any]) -> Found:
    """A stage that uses `a` and passes it on, passes on `b`, uses `c` alone, and has no use for the result of `d`."""
    import torch

    inputs = {name: torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for name in "abcd"}
    inputs["ids"] = torch.arange(2)
    outputs = {"a": inputs["a"], "b": inputs["b"], "x": inputs["a"] * inputs["c"], "ids": inputs["ids"]}
    grads = {name: torch.randn(2, 3, dtype=torch.float64) for name in "abx"}
    expected = {
        "a": grads["a"] + grads["x"] * inputs["c"],
        "b": grads["b"],
        "c": grads["x"] * inputs["a"],
        "d": torch.zeros(2, 3),
    }
    returned = fn(dict(inputs), dict(outputs), {name: grad.clone() for name, grad in grads.items()})
    if problem := _why_not_gradients(returned, inputs):
        return Found({}, {}, refused=problem)
    values = {f"the gradient of {name}": Numbers.of(returned[name]) for name in expected}
    return Found(values, {f"the gradient of {name}": Numbers.of(grad) for name, grad in expected.items()})


def _why_not_gradients(grads: Any, inputs: Any) -> str:
    import torch

    wanted = sorted(name for name, x in inputs.items() if x.is_floating_point())
    if not isinstance(grads, dict) or sorted(map(str, grads)) != wanted:
        got = sorted(map(str, grads)) if isinstance(grads, dict) else type(grads).__name__
        return f"return the gradients of {', '.join(wanted) or 'nothing'} by name, got {got}"
    for name in wanted:
        if not isinstance(grads[name], torch.Tensor) or grads[name].shape != inputs[name].shape:
            return f"the gradient of {name} is no tensor of its shape, which the stage before waits for"
    return ""


def _tower_in_words(off: Off) -> str:
    number, _, name = off.name.partition(".")
    tower = "image" if int(number) < 6 else "text"
    if off.found is None or not any(off.found.flat):
        what = "no gradient" if off.found is None else "gradient 0"
        return f"{name} of layer {number} has {what}: the {tower} tower does not learn"
    return in_words(off._replace(name=f"{name} of layer {number}, {tower} tower,"))


def _judge_pairwise(fn: Callable[..., Any], num_ranks: int, num_pairs: int) -> None:
    case = f"{num_pairs} pair(s) on each of {num_ranks} rank(s)"
    everyone = num_ranks * num_pairs * WIDTH * NUMBER
    most = (num_ranks - 1) * (2 * everyone + 2 * NUMBER)
    answer = Without(fn, *LIBRARY, *AUTOGRAD)
    compare_on_ranks(
        _pairwise,
        num_ranks,
        answer,
        num_pairs,
        case=case,
        limits=[Limit("bytes", most, _BYTES)],
        at=", rank {rank}: ",
    )


def _judge_stage_backward(fn: Callable[..., Any]) -> str:
    for sizes in CUTS:
        case = f"stages of {', '.join(map(str, sizes))} layers"
        compare_on_ranks(_chain, 1, fn, sizes, case=case, why=_tower_in_words, at=": ")
    compare_on_ranks(_chain, 1, fn, None, case="a stage that uses a tensor and passes it on", why=in_words, at=": ")
    return f"all gradients are those of one process for {len(CUTS)} cuts of the two towers"


numbers = Predict(
    "two_towers-1",
    "Negatives and bytes",
    NAMES,
    lambda d, width: (1023, 7168 * d, 2**20, 511, 128 * (77 * 2 * width + 4 * d)),
    "Features have {d} numbers",
    "bf16 of shape (128, 77, {width})",
    "float32 of shape (128, {d})",
    minutes=8,
    points=1,
    hints=(
        "A rank's 512 pairs of a step come in 4 microbatches. The loss sees the pairs of one microbatch on all ranks.",
        "An all-gather sends (N - 1) / N of the whole result from each rank. A pair has 2 d numbers.",
        "The gradient of every tensor that can have one comes back, also of those that the stage passes on.",
    ),
    slips=_SLIPS,
    d=(256, 64, 128, 384, 512),
    width=(64, 32, 48, 96, 128),
    called={"d": "numbers"},
)

pairwise = Implement(
    "two_towers-2",
    "Yes or no",
    "Write `gradients(a, c, scale)` of a loss that asks each pair a question of its own, by hand.",
    cases=((1, 2), (1, 3), (2, 2), (2, 5), (4, 1), (4, 4)),
    judge=_judge_pairwise,
    right="gradients of features and scale equal one process on 1 to 4 ranks; one gather, one way back",
    minutes=25,
    points=4,
    hints=(
        "Gather the texts only: products = a @ all_c.T, and signs = -1 but for +1 at this rank's own pairs.",
        "d loss / d logits = -signs * sigmoid(-signs * logits) / b, and all three gradients follow from it.",
        "The rows of texts go back with a reduce-scatter. The loss asked for is the mean over the ranks: divide by N "
        "once. The gradient of the scale is a sum over the ranks, too.",
    ),
)


stage_backward = Repair(
    "two_towers-4",
    "A tower that does not learn",
    "Repair `stage_backward(inputs, outputs, grads)`, with which one tower of two does not learn.",
    judge=_judge_stage_backward,
    minutes=10,
    points=3,
    hints=(
        "Which tensor is in the outputs of a text stage and was not computed there?",
        "The gradient of `image` comes from the loss, behind the text tower. Which stages must pass it on?",
        "A tensor that is passed on is the input itself. A backward from that tensor leaves the gradient in its .grad, "
        "beside what the stage's own use of it gives.",
    ),
)
