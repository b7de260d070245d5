import csv
import re

import pytest
from schedule_grid import ORACLES
from torch.distributed.pipelining import schedules as torch_schedules

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.torch_csv import from_torch_csv, to_torch_csv

PROGRAMS = [Program.parse(name, rows) for name, rows in ORACLES.items() if name != "legend"]


def test_what_torch_cannot_express_is_refused(subtests):
    split = Program.parse("split", ["0F0 (0F1;0I0)OVERLAP_F_B 0W0 0B1"])
    for program, options, message in (
        (PROGRAMS[0], {}, r"torch keeps a stage on one rank, but 'dualpipe 8 .* has stage . on ranks"),
        (split, {}, "use B in the pair"),
        (schedules.gpipe(1, 1), {"form": "both"}, "use 'compute_only' or 'compute_comms'"),
    ):
        with subtests.test(program=program.name), pytest.raises(ValueError, match=message):
            to_torch_csv(program, **options)


def expressible():
    """Every schedule of the registry that torch can express, at a few sizes."""
    for name in schedules.names():
        for num_ranks, num_microbatches in ((1, 2), (2, 4), (4, 8)):
            try:
                program = schedules.build(name, num_ranks, num_microbatches)
                to_torch_csv(program)
            except ValueError:
                continue
            yield program


def test_what_was_written_is_read_again(subtests):
    for program in [*expressible(), *PROGRAMS[1:]]:
        with subtests.test(repr(program)):
            assert from_torch_csv(to_torch_csv(program)) == program
            assert from_torch_csv(to_torch_csv(program, form="compute_comms")) == lower(program)
            waiting = to_torch_csv(program, form="compute_comms", waits=True)
            assert from_torch_csv(waiting) == lower(program)
            for row in csv.reader(waiting.splitlines()):
                started = [cell for cell in row if "SEND" in cell or "REDUCE" in cell]
                begun = [cell for cell in started if "WAIT" not in cell]
                assert sorted(begun) == sorted(cell.replace("WAIT_", "") for cell in started if "WAIT" in cell)
                assert all(row.index(cell) < row.index(re.sub("(?=SEND|REDUCE)", "WAIT_", cell)) for cell in begun)


def test_the_table_may_come_from_torch_or_a_spreadsheet(tmp_path):
    program = PROGRAMS[-1]
    rows = list(csv.reader(to_torch_csv(program).splitlines()))
    width = max(map(len, rows)) + 2
    spaced = [
        ["", *row, "1UNSHARD", "0REDUCE_GRAD", "0WAIT_REDUCE_GRAD", "3RESHARD", *[""] * (width - len(row))]
        for row in rows
    ]
    text = "\r\n".join(",".join(f' "{cell} "'[1:] if cell else cell for cell in row) for row in spaced)
    text = text.replace(";", " ; ") + "\r\n\r\n"
    (tmp_path / "mine.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    read = from_torch_csv(tmp_path / "mine.csv")
    assert read == program
    assert read.name == "mine"


def dumped_by_torch(name, num_ranks, num_microbatches, stages_a_rank):
    """What torch's own schedule writes with sends, receives and FSDP's actions."""
    table = torch_schedules.get_schedule_class(name)
    order = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer").get_schedule_ops(
        table, num_ranks, num_microbatches, stages_a_rank, with_comms=True
    )
    return "\n".join(",".join(map(str, row)) for row in order)


@pytest.mark.parametrize(
    ("name", "stages_a_rank"),
    [("Interleaved1F1B", 2), ("LoopedBFS", 2), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2)],
)
def test_torch_s_own_schedules_are_read_and_found_valid(name, stages_a_rank):
    text = dumped_by_torch(name, 4, 8, stages_a_rank)
    assert "UNSHARD" in text
    program = from_torch_csv(text, name)
    assert (program.num_ranks, program.num_stages, program.num_microbatches) == (4, 8, 8)
    assert program.is_lowered


TYPOS = [
    ("0F0,0G1,0B0,0B1\n", "row 1 (rank 0), cell 2: '0G1' is not an action"),
    ("0F0,0B0\n\n1F0,,1F0junk,1B0\n", "row 3 (rank 2), cell 3: '1F0junk' is not an action"),
    ("0F0;0F1;0B0;0B1\n", "row 1 (rank 0), cell 1: '0F0;0F1;0B0;0B1' is not an action"),
    ("0F0,(0F1;0F0)OVERLAP_F_B\n", "cell 2: '(0F1;0F0)OVERLAP_F_B' is not an action"),
    ("0F0,0UNSHARD1,0B0\n", "0UNSHARD1' is not an action; write stage, kind and microbatch, such as 2F0"),
    ("schedule.csv", "from_torch_csv reads text, got the name of a file; give Path('schedule.csv')"),
    ("0F0," + "x" * 200_000, "this is not CSV"),
]
WRONG = [  # what torch lets pass
    ("0F0,0F1,0F1,0B0,0B1", "0F1 runs again"),
    ("0F0,0F7,0B0,0B7", "microbatches run from 0 to 7, but no rank runs 1"),
    ("0F0,0B0,1F0,1B0\n0F1,0B1,1F1,1B1", "num_directions=1 allows every stage on one rank"),
    ("0F0,0SEND_F0,0B0\n1F0,1B0,1SEND_B0", "1RECV_F0 is missing"),
    ("", "it has no ranks"),
]


def test_what_is_no_program_is_refused(subtests, tmp_path):
    for text, message in TYPOS + WRONG:
        with subtests.test(text=text[:20]), pytest.raises(ValueError, match=re.escape(message)):
            from_torch_csv(text)
    assert [from_torch_csv(text, check=False).num_ranks for text, _ in WRONG] == [1, 1, 2, 2, 0]
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ValueError, match=r"picture\.csv is not text in UTF-8"):
        from_torch_csv(tmp_path / "picture.csv")
