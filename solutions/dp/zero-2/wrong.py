"""Typical wrong answers and lazy cheats of the exercises on ZeRO-2."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO, THREE, FOUR = (f"zero_2-{number}" for number in range(1, 5))
NUMBERS = "held, sent, peak"

TYPICAL = {
    ONE: {
        "ZeRO-1's bytes": Bad(f"{NUMBERS} = 16800, 25200, 2800", "this is ZeRO-1"),
        "one microbatch": Bad(f"{NUMBERS} = 13200, 7200, 2800", "each of the 6"),
        "weights in every microbatch": Bad(f"{NUMBERS} = 13200, 43200, 2800", "weights are gathered once"),
        "one bucket": Bad(f"{NUMBERS} = 13200, 25200, 2000", "while another one is under way"),
        "the whole gradient": Bad(f"{NUMBERS} = 13200, 25200, 4800", "which is never there"),
    },
    TWO: {
        "all at the end": Bad(
            """
def attach(buckets, shards):
    N, seen = comm.get_world_size(), [0]

    def arrived(_):
        seen[0] += 1
        if seen[0] < sum(map(len, buckets)):
            return
        seen[0] = 0
        for bucket, shard in zip(buckets, shards):
            flat = torch.cat([p.grad.flatten() for p in bucket])
            for p in bucket:
                p.grad = None
            own = torch.empty_like(shard)
            comm.reduce_scatter_single(own, pad(flat, (0, N * len(own) - len(flat))))
            shard += own

    for bucket in buckets:
        for p in bucket:
            p.register_post_accumulate_grad_hook(arrived)
""",
            "rank 0 had sent 0 of the 3 buckets that were full",
        ),
        "first come": Bad(
            """
def attach(buckets, shards):
    N = comm.get_world_size()
    place = {p: index for index, bucket in enumerate(buckets) for p in bucket}
    missing = [len(bucket) for bucket in buckets]

    def arrived(p):
        index = place[p]
        missing[index] -= 1
        if missing[index] == 0:
            missing[index] = len(buckets[index])
            flat = torch.cat([p.grad.flatten() for p in buckets[index]])
            for p in buckets[index]:
                p.grad = None
            own = torch.empty_like(shards[index])
            comm.reduce_scatter_single(own, pad(flat, (0, N * len(own) - len(flat))))
            shards[index] += own

    for p in place:
        p.register_post_accumulate_grad_hook(arrived)
""",
            "did buckets change places",
        ),
        "keeps .grad": Bad([("            p.grad = None", "            pass")], "holds"),
        "overwrites": Bad([("shards[index] += own", "shards[index].copy_(own)")], "the last microbatch alone"),
        "stops after one microbatch": Bad([("upcoming[0] %= len(buckets)", "pass")], "the first microbatch alone"),
        "the mean": Bad([("+= own", "+= own / N")], "divided by the ranks"),
        "one message per parameter": Bad(
            """
def attach(buckets, shards):
    N, rank = comm.get_world_size(), comm.get_rank()
    for index, bucket in enumerate(buckets):
        def arrived(p, index=index, bucket=bucket):
            if any(q.grad is None for q in bucket):
                return
            flat = torch.cat([q.grad.flatten() for q in bucket])
            for q in bucket:
                q.grad = None
            comm.all_reduce(flat)
            shards[index] += pad(flat, (0, N * len(shards[index]) - len(flat))).view(N, -1)[rank]
        for p in bucket:
            p.register_post_accumulate_grad_hook(arrived)
""",
            "reduce-scatters, expected",
        ),
    },
    THREE: {
        "the starter": Bad([("    p.grad = None\n", "")], "count several times"),
        "overwrites": Bad([("shard += own", "shard.copy_(own)")], "the last microbatch alone"),
        "drops it before": Bad(
            [("    whole = pad", "    shard.zero_()\n    whole = pad")], "the last microbatch alone"
        ),
        "zeroes it in place": Bad([("p.grad = None", "whole = whole.clone(); p.grad.zero_()")], "holds"),
    },
    FOUR: {
        "ZeRO-1 does not fit": Bad('stage, num_microbatches = "zero1", 8', "needs 46 GB"),
        "too small a microbatch": Bad('stage, num_microbatches = "zero1", 32', "too small"),
        "ZeRO-3": Bad('stage, num_microbatches = "zero3", 2', "5 are possible"),
        "too many microbatches": Bad('stage, num_microbatches = "zero2", 8', "sends 9 units"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + f"{NUMBERS} = [Anything()] * 3", "whole number")},
    TWO: {"nothing": Bad("def attach(buckets, shards):\n    pass", "it is zero")},
    THREE: {
        "nothing": Bad("def scatter(p, shard):\n    p.grad = None", "it is zero"),
        "no message": Bad(
            """
def scatter(p, shard):
    N, rank = comm.get_world_size(), comm.get_rank()
    shard += pad(p.grad.flatten(), (0, -p.numel() % N)).view(N, -1)[rank]
    p.grad = None
""",
            "2 rank(s), 1 microbatch(es)",
        ),
    },
    FOUR: {
        "equal to everything": Bad(EQUAL_TO_ALL + "stage, num_microbatches = Anything(), Anything()", "the stages are"),
        "no microbatches": Bad('stage, num_microbatches = "zero2", 0', "are cut into"),
    },
}
