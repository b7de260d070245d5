"""Right answers of another style to the milestones of the project."""

RIGHT = {
    "project-1": {
        "a fixed list of stages": """
SPLITS = {1: [6], 2: [3, 3], 3: [2, 3, 1], 4: [1, 2, 2, 1]}

def place(rank, sizes, shapes):
    rest, t = divmod(rank, sizes["tp"])
    stage = rest // sizes["dp"]
    counts = SPLITS[sizes["pp"]]
    mine = range(sum(counts[:stage]), sum(counts[:stage]) + counts[stage])
    ends = {0: ["embedding"], sizes["pp"] - 1: ["embedding", "norm"]} if sizes["pp"] > 1 else {0: ["embedding", "norm"]}
    found = {}
    for name, shape in shapes.items():
        words = name.split(".")
        if words[0] == "layers" and int(words[1]) in mine or words[0] in ends.get(stage, []):
            found[name] = tuple(slice(None) for _ in shape)
            if len(shape) == 2:
                axis = int(words[-2] in ("o", "down"))
                size = shape[axis] // sizes["tp"]
                found[name] = tuple(slice(t * size, t * size + size) if i == axis else slice(None) for i in (0, 1))
    return found
""",
        "the heaviest stage gives a layer": [
            ("    best = min(splits, key=", "    best = sorted(splits, key="),
            ('range(sizes["pp"])))\n    return', 'range(sizes["pp"])))[0]\n    return'),
        ],
    },
    "project-2": {
        "flat buckets, a set of counted ranks": """
def sum_gradients(parts):
    dense = [w.parameter for n, w in parts.weights.items() if not n.startswith("embedding")]
    tables = [w.parameter for n, w in parts.weights.items() if n.startswith("embedding")]
    for held, axes in ((dense, ("dp",)), (tables, ("dp", "pp"))):
        flat = torch.cat([p.grad.flatten() for p in held])
        comm.all_reduce(flat, group=parts.mesh.group(*axes))
        for p, grad in zip(held, flat.split([p.numel() for p in held])):
            p.grad = grad.view_as(p).clone()


def clip(parts, max_norm):
    at = parts.mesh.coordinates
    counted = [
        w.parameter.grad.norm() ** 2 for n, w in parts.weights.items()
        if at["dp"] == 0 and (w.shard is not None or at["tp"] == 0) and (n != "embedding.weight" or at["pp"] == 0)
    ]
    total = torch.stack([torch.zeros((), dtype=torch.float64), *counted]).sum()
    comm.all_reduce(total)
    norm = total.item() ** 0.5
    if norm + 1e-6 > max_norm:
        for weight in parts.weights.values():
            weight.parameter.grad.mul_(max_norm / (norm + 1e-6))
    return norm
""",
        "gathered on every rank": [
            ("    comm.all_reduce(total)\n", "    total = sum(comm.all_gather_object(total))\n"),
        ],
    },
    "project-3": {
        "moments by hand": """
class ShardedAdam:
    def __init__(self, weights, group, lr, betas, eps, weight_decay):
        self.w, self.group, self.lr, self.betas, self.eps, self.decay = weights, group, lr, betas, eps, weight_decay
        self.n, self.r = comm.get_world_size(group), comm.get_rank(group)
        size = -(-sum(w.numel() for w in weights) // self.n)
        self.m, self.v, self.t = torch.zeros(size).double(), torch.zeros(size).double(), 0

    def flat(self, tensors):
        found = torch.zeros(len(self.m) * self.n, dtype=torch.float64)
        found[: sum(t.numel() for t in tensors)] = torch.cat([t.reshape(-1) for t in tensors])
        return found

    @torch.no_grad()
    def step(self):
        self.t += 1
        g = torch.empty_like(self.m)
        comm.reduce_scatter_single(g, self.flat([w.grad for w in self.w]), group=self.group)
        b, c = self.betas
        self.m.mul_(b).add_(g, alpha=1 - b)
        self.v.mul_(c).addcmul_(g, g, value=1 - c)
        full = self.flat(self.w)
        mine = full.view(self.n, -1)[self.r].clone()
        mine -= self.lr * self.decay * mine
        mine -= self.lr * (self.m / (1 - b**self.t)) / ((self.v / (1 - c**self.t)).sqrt() + self.eps)
        comm.all_gather_single(full, mine, self.group)
        at = 0
        for w in self.w:
            w.copy_(full[at : at + w.numel()].view_as(w))
            at += w.numel()
""",
        "weights that are views of one vector": """
class ShardedAdam:
    def __init__(self, weights, group, lr, betas, eps, weight_decay):
        n, r = comm.get_world_size(group), comm.get_rank(group)
        count = sum(w.numel() for w in weights)
        self.full = torch.zeros(n * -(-count // n), dtype=torch.float64)
        at = 0
        for w in weights:
            self.full[at : at + w.numel()] = w.detach().flatten()
            w.data = self.full[at : at + w.numel()].view_as(w)
            at += w.numel()
        self.weights, self.group, self.count = weights, group, count
        self.shard = self.full.chunk(n)[r].requires_grad_()
        self.adam = torch.optim.AdamW([self.shard], lr, betas, eps, weight_decay, foreach=False)

    def step(self):
        rest = torch.zeros(len(self.full) - self.count).double()
        grads = torch.cat([w.grad.flatten() for w in self.weights] + [rest])
        self.shard.grad = torch.empty_like(self.shard)
        comm.reduce_scatter_single(self.shard.grad, grads, group=self.group)
        self.adam.step()
        self.shard.grad = None
        comm.all_gather_single(self.full, self.shard.detach().clone(), self.group)
""",
    },
    "project-4": {
        "the library's search": "rows = pp.optimise(pp.schedules.build('gpipe', 4, 8), COST, in_flight=3).program",
        "another order that is as quick": [("0W5 0I6 0W6", "0I6 0W5 0W6")],
    },
    "project-5": {
        "a file per weight": """
def starts(step, data_rank, data_size):
    generator = torch.Generator().manual_seed(1000 + step)
    every = torch.randint(0, NUM_BYTES - LENGTH, (BATCH,), generator=generator)
    return every.chunk(data_size)[data_rank].tolist()


def save(folder, step, parts):
    group = parts.mesh.group("tp")
    for name, (parameter, shard) in parts.weights.items():
        state = parts.adam.state[parameter]
        found = []
        for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
            rows = comm.all_gather_object(tensor, group)
            found.append(rows[0] if shard is None else torch.cat(rows, shard.axis))
        if parts.mesh.global_rank == 0:
            torch.save([step, *found], f"{folder}/{name}.pt")
    comm.barrier()


def load(folder, parts):
    for name, (parameter, shard) in parts.weights.items():
        step, *full = torch.load(f"{folder}/{name}.pt")
        weight, first, second = (tensor if shard is None else shard.of(tensor) for tensor in full)
        parameter.data.copy_(weight)
        moments = {"exp_avg": first.clone(), "exp_avg_sq": second.clone()}
        parts.adam.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return step
""",
        "another draw": [
            ("[int(Random(f\"{step}/{number}\").random() * (NUM_BYTES - LENGTH)) for number in numbers]",
             "[(step * BATCH + number) * 40503 % (NUM_BYTES - LENGTH) for number in numbers]"),
        ],
    },
    "project-6": {
        "two buckets": """
def train_step(parts, batch, max_norm):
    for weight in parts.weights.values():
        weight.parameter.grad = None
    parts.model.begin_step(batch.num_tokens, batch.num_sequences)
    losses = parts.runtime.step(batch.inputs, batch.targets, weights=[1.0] * len(batch.inputs)).losses
    is_expert = {n: w.shard is not None and w.shard.mesh_axis == "ep" for n, w in parts.weights.items()}
    log = torch.zeros(2, dtype=torch.float64)
    for kind, axes in ((False, ("dp", "ep")), (True, ("dp",))):
        held = [w.parameter for n, w in parts.weights.items() if is_expert[n] is kind]
        group = parts.mesh.group(*axes)
        if held:
            flat = torch.cat([p.grad.flatten() for p in held])
            comm.all_reduce(flat, group=group)
            for p, part in zip(held, flat.split([p.numel() for p in held])):
                p.grad = part.view_as(p)
            log[0] += flat.square().sum() * (comm.get_rank(group) == 0)
    log[1] = sum(float(loss.detach()) for loss in losses.values())
    comm.all_reduce(log)
    norm = log[0].sqrt()
    for weight in parts.weights.values():
        weight.parameter.grad *= torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    parts.adam.step()
    return log[1], norm
""",
        "a reduce-scatter and an all-gather for experts": [
            ("        comm.all_reduce(parameter.grad, group=dp if is_expert else everyone)\n",
             "        if is_expert:\n"
             "            half = parameter.grad.new_empty(parameter.numel() // 2)\n"
             "            comm.reduce_scatter_single(half, parameter.grad.flatten(), group=dp)\n"
             "            comm.all_gather_single(parameter.grad.view(-1), half, dp)\n"
             "        else:\n"
             "            comm.all_reduce(parameter.grad, group=everyone)\n"),
        ],
    },
}  # fmt: skip
