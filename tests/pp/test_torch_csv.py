import csv
import json
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.torch_csv import to_torch_csv

ORACLES = json.loads((Path(__file__).parents[1] / "oracles" / "programs.json").read_text())
PROGRAMS = [Program.parse(name, rows) for name, rows in ORACLES.items() if name != "legend"]
EXPRESSIBLE = [schedules.gpipe(4, 8), schedules.one_f_one_b(4, 8), schedules.one_f_one_b(4, 2), *PROGRAMS[1:]]


def read_by_torch(text):
    return {
        rank: [torch_schedules._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(csv.reader(text.splitlines()))
    }


@pytest.mark.parametrize("program", EXPRESSIBLE, ids=lambda program: program.name)
def test_torch_reads_and_validates_the_program(program):
    actions = read_by_torch(to_torch_csv(program))
    assert [" ".join(map(str, actions[rank])) for rank in range(program.num_ranks)] == program.rows()
    homes = torch_schedules._validate_schedule(actions, program.num_ranks, program.num_stages, program.num_microbatches)
    assert homes == {stage: program.rank_of(stage, 0) for stage in range(program.num_stages)}


@pytest.mark.parametrize("program", [p for p in EXPRESSIBLE if not any("OVERLAP" in row for row in p.rows())], ids=str)
def test_torch_runs_the_sends_and_receives_dry(program):
    actions = read_by_torch(to_torch_csv(program, form="compute_comms"))
    done = torch_schedules._simulate_comms_compute(actions, lambda stage: program.rank_of(stage, 0), program.num_stages)
    for rank, slots in done.items():
        assert [slot for slot in slots if slot is not None] == actions[rank]


def test_a_stage_on_two_ranks_cannot_be_expressed():
    with pytest.raises(ValueError, match=r"torch keeps a stage on one rank, but 'dualpipe 8 .* has stage . on ranks"):
        to_torch_csv(PROGRAMS[0])


def test_a_pair_with_a_split_backward_cannot_be_expressed():
    program = Program.parse("split", ["0F0 (0F1;0I0)OVERLAP_F_B 0W0 0B1"])
    with pytest.raises(ValueError, match="use B in the pair"):
        to_torch_csv(program)


def test_unknown_forms_are_refused():
    with pytest.raises(ValueError, match="use 'compute_only' or 'compute_comms'"):
        to_torch_csv(schedules.gpipe(1, 1), form="both")
