"""Typical wrong answers and lazy cheats of the exercises on saving and loading."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "last_file, files_of_rank_1, from_file_1, ranges"
SAVE = "def save(disk, name, parts):\n"

TYPICAL = {
    "io-1": {
        "fair shares": Bad(f"{NAMES} = 30, 2, 24, 6", "elements are not cut"),
        "weights alone": Bad(f"{NAMES} = 4, 2, 8, 6", "two moments"),
        "whole file 1": Bad(f"{NAMES} = 12, 2, 36, 6", "goes to rank 0"),
    },
    "io-2": {
        "rows in all files": Bad([("max(0, min(size, rows - file * size))", "size")], "the file's own beginning"),
        "no columns": Bad(
            [("    if begin == end:\n        return torch.empty(rows, 0)\n", "")], "read only what a file has"
        ),
        "row by row": Bad([("end - begin == columns and held", "False")], "in a file takes one read"),
    },
    "io-3": {

        "in place": Bad(
            SAVE
            + "    disk.mkdir(f'run/{name}')\n    for part, data in parts.items():\n"
            + "        disk.write(f'run/{name}/{part}', data)\n        disk.sync(f'run/{name}/{part}')\n"
            + "    disk.sync(f'run/{name}')\n    disk.sync('run')",
            "step-2 is there, but",
        ),
        "files not synced": Bad([('        disk.sync(f"{hidden}/{part}")\n', "")], "sync every file"),
        "names not synced": Bad([("    disk.sync(hidden)\n", "")], "its own names"),
    },
    "io-4": {

        "the batch for the step": Bad([('saved["num_steps"]', 'saved["next_batch"]')], "counts 12 steps, 10 were made"),
        "the step for the batch": Bad([('return saved["next_batch"]', 'return saved["num_steps"]')], "batch is number"),
        "steps only": Bad([('["random"][rank]', '["random"][0]')], "those of rank 0"),
    },
}  # fmt: skip

CHEATS = {
    "io-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")},
    "io-2": {
        "the library's": Bad(
            """
from dualpipe_lab.dp.layout import reshard
def load_shard(read, rows, columns, num_files, num_ranks, rank):
    parts = reshard(rows * columns, num_files, num_ranks)[rank]
    return torch.cat([read(p.source, p.start, p.stop) for p in parts]).view(rows, -1)
""",
            "switched off",
        ),
    },
    "io-3": {
        "nothing": Bad(SAVE + "    pass", "may be gone"),
    },
    "io-4": {
        "nothing": Bad("def resume(saved, adam, rank):\n    return saved['next_batch']", "the weights are not"),
    },
}
