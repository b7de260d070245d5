"""Right answers of another style to the exercises on ZeRO-2."""

RIGHT = {
    "zero_2-2": {
        "asks .grad who is there": """
def attach(buckets, shards):
    N, turn = comm.get_world_size(), [0]

    def arrived(_):
        while all(p.grad is not None for p in buckets[turn[0]]):
            bucket, shard = buckets[turn[0]], shards[turn[0]]
            buffer = shard.new_zeros(N, len(shard))
            start = 0
            for p in bucket:
                buffer.view(-1)[start : start + p.numel()] = p.grad.reshape(-1)
                start += p.numel()
                p.grad = None
            part = torch.empty_like(shard)
            comm.reduce_scatter_single(part, buffer.view(-1))
            shard.add_(part)
            turn[0] = (turn[0] + 1) % len(buckets)

    for bucket in buckets:
        for p in bucket:
            p.register_post_accumulate_grad_hook(arrived)
""",
        "a class with asynchronous sends that it waits for at the end of each backward": """
class Scatterer:
    def __init__(self, buckets, shards):
        self.buckets, self.shards, self.N = buckets, shards, comm.get_world_size()
        self.ready, self.under_way = set(), []
        for bucket in buckets:
            for p in bucket:
                p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, p):
        self.ready.add(p)
        for number in range(len(self.under_way), len(self.buckets)):
            if not self.ready.issuperset(self.buckets[number]):
                return
            self.send(number)
        for number, (work, own, _) in enumerate(self.under_way):
            work.wait()
            self.shards[number] += own
        self.under_way.clear()
        self.ready.clear()

    def send(self, number):
        flat = torch.cat([p.grad.flatten() for p in self.buckets[number]])
        for p in self.buckets[number]:
            p.grad = None
        own = torch.empty_like(self.shards[number])
        flat = pad(flat, (0, self.N * len(own) - len(flat)))
        self.under_way.append((comm.reduce_scatter_single(own, flat, async_op=True), own, flat))

def attach(buckets, shards):
    Scatterer(buckets, shards)
""",
    },
    "zero_2-3": {
        "a buffer of N rows": """
def scatter(p, shard):
    rows = shard.new_zeros(comm.get_world_size(), len(shard))
    rows.view(-1)[: p.numel()].copy_(p.grad.view(-1))
    part = shard.clone()
    comm.reduce_scatter_single(part, rows.view(-1))
    shard.add_(part)
    del p.grad
""",
        "drops .grad last": [("    p.grad = None\n", ""), ("    shard += own", "    shard += own\n    p.grad = None")],
    },
}
