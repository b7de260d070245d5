"""Typical wrong answers and lazy cheats of the exercises on the options of mixed precision."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "one_by_one, in_pairs, moves, steps, num_bytes = "

TYPICAL = {
    "mixed_precision_options-1": {
        "as with ones": Bad(_PREDICT + "256, 512, 64, 64, 7", "halves are lost earlier"),
        "exact": Bad(_PREDICT + "1_000, 512, 64, 64, 7", "a half is a tie"),
        "pairs stand still": Bad(_PREDICT + "128, 128, 64, 64, 7", "doubling is exact"),
        "spacing of 1": Bad(_PREDICT + "128, 512, 128, 64, 7", "between 1 and 2"),
        "the distance": Bad(_PREDICT + "128, 512, 64, 32, 7", "grows with the root"),
        "moments whole": Bad(_PREDICT + "128, 512, 64, 64, 10", "shared by 4 ranks"),
    },
    "mixed_precision_options-2": {
        "cut off": Bad([("(bits + 2**15) & -(2**16)", "bits & -(2**16)")], "is not the nearest"),
        "torch's own rounding": Bad(
            [("(bits + 2**15) & -(2**16)", "master.bfloat16().float().view(torch.int32)")],
            "a master in the middle between two bf16 numbers",
        ),
        "a difference in bf16": Bad(
            """
def split(master):
    weight = master.bfloat16()
    return weight, (master - weight.float()).bfloat16()

def join(weight, rest):
    return weight.float() + rest.float()
""",
            "comes back as",
        ),
        "rest without its sign": Bad([("rest.to(torch.int32)", "(rest.to(torch.int32) & 0xFFFF)")], "comes back as"),
        "32 bits": Bad([(".to(torch.int16)", "")], "two are enough"),
    },
    "mixed_precision_options-3": {
        "own noise per rank": Bad([("+ part", "+ part + dp_rank")], "hold copies of one weight"),
        "norms cut": Bad([("tp_rank if is_cut else 0", "tp_rank")], "is not cut"),
        "one noise along tp": Bad([("tp_rank if is_cut else 0", "0")], "need their own"),
        "a sum": Bad([("((seed * 2**16 + step) * 2**10 + index)", "(seed + step + index)")], "need their own"),
        "never the largest": Bad([("randint(2**16,", "randint(2**16 - 1,")], "the largest 65,534"),
        "no seed": Bad([("seed * 2**16", "2**16")], "the noise is that of seed 1"),
        "bits above 32": Bad([("seed * 2**16 + step", "seed * 2**17 + step")], "seed 2, step 0, parameter 0"),
        "a sum with factors": Bad(
            [("((seed * 2**16 + step) * 2**10 + index) * 2**4", "seed * 1_000_003 + step * 10_007 + index * 101")],
            "need their own",
        ),
        "room for eight ranks": Bad([("2**4 + part", "2**3 + part")], "need their own"),
        "other type": Bad([("dtype=torch.int32", "dtype=torch.int64")], "int32 numbers"),
    },
}

CHEATS = {
    "mixed_precision_options-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "one_by_one = in_pairs = moves = steps = num_bytes = Anything()", "must be a whole number"
        ),
    },
    "mixed_precision_options-2": {
        "keeps the master aside": Bad(
            """
def split(master):
    return master.bfloat16(), master

def join(weight, rest):
    return rest
""",
            "two are enough",
        ),
    },
    "mixed_precision_options-3": {
        "no noise": Bad(
            "def noise(size, seed, step, index, dp_rank, tp_rank, is_cut):\n"
            "    return torch.full((size,), 2**15, dtype=torch.int32)",
            "need their own",
        ),
        "a counter": Bad(
            "def noise(size, seed, step, index, dp_rank, tp_rank, is_cut):\n"
            "    place = ((seed * 2**16 + step) * 2**10 + index) * 2**4 + (tp_rank if is_cut else 0)\n"
            "    i, stride = torch.arange(size), 2 * (place // 2**16) + 1\n"
            "    return ((place + i * stride + i * i * (place // 2**31)) % 2**16).to(torch.int32)",
            "follow each other by a rule",
        ),
    },
}
