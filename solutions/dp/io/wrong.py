"""Typical wrong answers and lazy cheats of the exercises on saving and loading."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "last_file, files_of_rank_1, from_file_1, ranges"
LOAD = "def load_shard(read, rows, columns, num_files, num_ranks, rank):\n"
SAVE = "def save(disk, name, parts):\n"
RESUME = "def resume(saved, adam, rank):\n"

TYPICAL = {
    "io-1": {
        "fair shares": Bad(f"{NAMES} = 30, 2, 24, 6", "elements are not cut"),
        "weights alone": Bad(f"{NAMES} = 4, 2, 8, 6", "two moments"),
        "whole file 1": Bad(f"{NAMES} = 12, 2, 36, 6", "goes to rank 0"),
        "three files": Bad(f"{NAMES} = 12, 3, 24, 6", "in which files"),
        "a range per file": Bad(f"{NAMES} = 12, 2, 24, 4", "read by two ranks"),
    },
    "io-2": {
        "the page's flat ranges": Bad(
            LOAD
            + """
    numel = rows * columns
    size, share = -(-rows // num_files) * columns, -(-numel // num_ranks)
    begin, end = rank * share, min((rank + 1) * share, numel)
    parts = []
    for file in range(num_files):
        first, last = max(begin, file * size), min(end, (file + 1) * size)
        if first < last:
            parts.append(read(file, first - file * size, last - file * size))
    return torch.cat(parts).view(rows, -1)
""",
            "4 x 6, 2 file(s), rank 0 of 3: got",
        ),
        "rows of the matrix": Bad(
            [("starts = [i * columns for", "starts = [(file * size + i) * columns for")], "the file's own beginning"
        ),
        "rounded down": Bad([("-(-columns // num_ranks)", "columns // num_ranks")], "5 x 7, 2 file(s), rank 0 of 3"),
        "rows in all files": Bad([("max(0, min(size, rows - file * size))", "size")], "the file's own beginning"),
        "no columns": Bad(
            [("    if begin == end:\n        return torch.empty(rows, 0)\n", "")], "read only what a file has"
        ),
        "row by row": Bad([("end - begin == columns and held", "False")], "in a file takes one read"),
        "whole rows": Bad(
            [("[read(file, start + begin, start + end) for", "[read(file, start, start + columns)[begin:end] for")],
            "its own and no others",
        ),
        "columns as rows": Bad([(".view(rows, end - begin)", ".view(end - begin, rows)")], "expected an fp32 tensor"),
    },
    "io-3": {

        "another step's name": Bad([('f"run/.saving-{name}"', 'f"run/{name}.tmp"')], "a folder step-2.tmp is there"),
        "in place": Bad(
            SAVE
            + "    disk.mkdir(f'run/{name}')\n    for part, data in parts.items():\n"
            + "        disk.write(f'run/{name}/{part}', data)\n        disk.sync(f'run/{name}/{part}')\n"
            + "    disk.sync(f'run/{name}')\n    disk.sync('run')",
            "step-2 is there, but",
        ),
        "files not synced": Bad([('        disk.sync(f"{hidden}/{part}")\n', "")], "sync every file"),
        "names not synced": Bad([("    disk.sync(hidden)\n", "")], "its own names"),
        "rename not synced": Bad([('    disk.sync("run")\n', "    pass\n")], "may be gone"),
        "sync too late": Bad(
            [("    disk.sync(hidden)\n", ""), ('disk.sync("run")', 'disk.sync(f"run/{name}")\n    disk.sync("run")')],
            "may not be in it",
        ),
        "leftovers": Bad([("    if disk.exists(hidden):\n        disk.remove(hidden)\n", "")], "starts again"),
        "removes the old": Bad([("    disk.mkdir", "    disk.remove('run/step-1')\n    disk.mkdir")], "leave it alone"),
    },
    "io-4": {

        "the batch for the step": Bad([('saved["num_steps"]', 'saved["next_batch"]')], "counts 12 steps, 10 were made"),
        "the step for the batch": Bad([('return saved["next_batch"]', 'return saved["num_steps"]')], "batch is number"),
        "steps only": Bad([('["random"][rank]', '["random"][0]')], "those of rank 0"),
        "random numbers only": Bad([('saved["num_steps"]', "0")], "2.07 times the right one"),
        "one too many": Bad([('saved["num_steps"]', 'saved["num_steps"] + 1')], "counts 11 steps"),
        "second moment forgotten": Bad([('        state["exp_avg_sq"].copy_(nu)\n', "")], "the moments are not"),
        "takes what was saved": Bad(
            [('        state["exp_avg"].copy_(mu)\n        state["exp_avg_sq"].copy_(nu)\n',
              "        state.update(exp_avg=mu, exp_avg_sq=nu)\n")],
            "training changed what was saved",
        ),
        "from the start of the data": Bad([('return saved["next_batch"]', "return 0")], "the next batch is number 12"),
        "seeds anew": Bad([('torch.set_rng_state(saved["random"][rank])', "torch.manual_seed(rank)")], "other masks"),
    },
}  # fmt: skip

CHEATS = {
    "io-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")},
    "io-2": {
        "makes them up": Bad(
            LOAD
            + "    share = -(-columns // num_ranks)\n"
            + "    whole = torch.arange(float(rows * columns)).view(rows, columns) + 1\n"
            + "    return whole[:, rank * share : (rank + 1) * share]",
            "read 0 elements",
        ),
        "the library's": Bad(
            "from dualpipe_lab.dp.layout import reshard\n"
            + LOAD
            + "    parts = reshard(rows * columns, num_files, num_ranks)[rank]\n"
            + "    return torch.cat([read(p.source, p.start, p.stop) for p in parts]).view(rows, -1)",
            "switched off",
        ),
    },
    "io-3": {
        "nothing": Bad(SAVE + "    pass", "may be gone"),
        "a name alone": Bad(SAVE + "    disk.mkdir(f'run/{name}')\n    disk.sync('run')", "may not be in it"),
    },
    "io-4": {
        "nothing": Bad(RESUME + "    return saved['next_batch']", "the weights are not"),
        "another optimizer": Bad(
            RESUME + "    adam.__class__ = type('Anything', (), {})\n    return 10", "another object"
        ),
    },
}
