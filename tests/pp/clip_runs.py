"""What the tests of CLIP share: pairs for all data ranks, one process in plain torch, and a step on a mesh."""

import torch
from runs import draw
from torch.nn.functional import cross_entropy

import dualpipe_lab as lab
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.sharded import full_gradients
from dualpipe_lab.models.clip import ClipConfig, clip_layers, clip_loss, clip_stages
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.partition import partition
from dualpipe_lab.pp.runtime import PipelineRuntime

CONFIG, M, PAIRS = ClipConfig(), 8, 3  # microbatches, and pairs of each on every data rank


def pairs(num_data):
    """Pixels and ids, `_NMB`; each text has its end at another place."""
    pixels = draw(1, num_data, M, PAIRS, CONFIG.image_size, CONFIG.image_size)
    generator = torch.Generator().manual_seed(2)
    shape = (num_data, M, PAIRS, CONFIG.text_length)
    ids = torch.randint(CONFIG.vocabulary_size - 1, shape, generator=generator)
    ends = torch.randint(CONFIG.text_length, (*shape[:-1], 1), generator=generator)
    return pixels, ids.scatter(-1, ends, CONFIG.vocabulary_size - 1)


def one_process(num_data):
    """Loss, and gradients by name, of all pairs; negatives are the pairs of one microbatch on all data ranks."""
    layers, total = clip_layers(CONFIG), 0.0
    pixels, ids = pairs(num_data)
    for m in range(M):
        payload = {"pixels": pixels[:, m].flatten(0, 1), "ids": ids[:, m].flatten(0, 1)}
        for layer in layers:
            payload = layer(payload)
        logits = payload["scale"] * payload["image"] @ payload["text"].t()
        own = torch.arange(len(logits))
        loss = (cross_entropy(logits, own) + cross_entropy(logits.t(), own)) / 2 / M
        loss.backward()
        total += loss.item()
    named = ((f"{at}.{name}", p) for at, layer in enumerate(layers) for name, p in layer.named_parameters())
    return {name: p.grad for name, p in named}, total


def step(mesh, name, ride):
    """One step of a rank: its gradients by name, summed over copies and data ranks, and its losses."""
    num_data = mesh.size("dp")
    program = schedules.build(name, mesh.size("pp"), M)
    layers = [layer.to(lab.device()) for layer in clip_layers(CONFIG)]
    cut = partition([sum(p.numel() for p in layer.parameters()) for layer in layers], program.num_stages)
    stages = clip_stages(layers, cut.sizes)
    mine = {action.stage: stages[action.stage] for action in program.actions(mesh.rank("pp"))}
    held = [DDP(mine[stage], mesh.group("dp")) for stage in sorted(mine)]
    runtime = PipelineRuntime(program, mine, clip_loss(mesh.group("dp")), group=mesh.group("pp"))
    pixels, ids = (part[mesh.rank("dp")].to(lab.device()) for part in pairs(num_data))
    inputs = [{"pixels": x} | ({"ids": y} if ride else {}) for x, y in zip(pixels, ids, strict=True)]
    text_stage = next(s for s, numbers in enumerate(cut.stages) if CONFIG.image_layers + 2 in numbers)
    extra = None if ride else {text_stage: [{"ids": y} for y in ids]}
    result = runtime.step(inputs, [None] * M, [1 / (num_data * M)] * M, extra)
    grads = {name.removeprefix("layers."): g for one in held for name, g in full_gradients(one).items()}
    return grads, float(sum(result.losses.values()))


def run(rank, world_size, names):
    """In a rank: a step on every schedule, on 2 data ranks; on the last one ids do not ride along."""
    torch.manual_seed(rank)
    mesh = lab.Mesh(lab.Topology([("pp", world_size // 2), ("dp", 2)]))
    return {name: step(mesh, name, ride=name != names[-1]) for name in names}
