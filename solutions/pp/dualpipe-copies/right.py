"""Right answers of another style to the exercises on DualPipe's two copies."""

RIGHT = {
    "dualpipe_copies-2": {
        "all gradients, then all weights": """
def owned_step(rank, world_size, stages, momentum, lr, beta):
    mirror = world_size - 1 - rank
    mine, other = list(stages[rank].parameters()), list(stages[mirror].parameters())
    sends = [comm.isend(w.grad, mirror) for w in other]
    for w, v in zip(mine, momentum):
        g = torch.empty_like(w)
        comm.recv(g.detach(), mirror)
        v.copy_(beta * v + (w.grad + g.detach()))
        w.data.sub_(lr * v)
    sends += [comm.isend(w.data, mirror) for w in mine]
    for w in other:
        comm.recv(w.data, mirror)
    for send in sends:
        send.wait()
""",
        "one message each way": """
def owned_step(rank, world_size, stages, momentum, lr, beta):
    mirror = world_size - 1 - rank
    for stage in sorted(stages):
        weights = list(stages[stage].parameters())
        flat = torch.cat([w.grad.flatten() for w in weights])
        if stage != rank:
            comm.send(flat, mirror)
            comm.recv(flat, mirror)
        else:
            theirs = torch.empty_like(flat)
            comm.recv(theirs, mirror)
            parts = (flat + theirs).split([w.numel() for w in weights])
            for w, v, g in zip(weights, momentum, parts):
                v.mul_(beta)
                v += g.view_as(v)
                w.data -= lr * v
            flat = torch.cat([w.detach().flatten() for w in weights])
            comm.send(flat, mirror)
        for w, part in zip(weights, flat.split([w.numel() for w in weights])):
            w.data.copy_(part.view_as(w))
""",
    },
    "dualpipe_copies-3": {
        "a list of modules knows each once": """
def sum_copies(rank, world_size, stages):
    pairs = [comm.new_group([r, world_size - 1 - r]) for r in range(world_size // 2)]
    both = nn.ModuleList([stages[stage] for stage in sorted(stages)])
    for w in both.parameters():
        comm.all_reduce(w.grad, group=pairs[min(rank, world_size - 1 - rank)])
""",
        "messages between mirrors": """
def sum_copies(rank, world_size, stages):
    mirror = world_size - 1 - rank
    weights = {w: None for stage in sorted(stages) for w in stages[stage].parameters()}
    for w in weights:
        theirs = torch.empty_like(w.grad)
        sending = comm.isend(w.grad.clone(), mirror)
        comm.recv(theirs, mirror)
        sending.wait()
        w.grad += theirs
""",
    },
}
