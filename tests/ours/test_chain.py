"""What passes between the parts: rows as texts, messages beside what needs them, imports of earlier parts alone."""

import re
from pathlib import Path

import dualpipe_ours
from dualpipe_course.own.parts import FAMILIES, PARTS, RUNS, SHORT_WAY
from dualpipe_course.own.runs import part_check
from dualpipe_lab.pp import schedules
from dualpipe_ours.memory import rank_bytes
from dualpipe_ours.row_messages import with_messages
from dualpipe_ours.rows_1f1b import one_f_one_b_rows
from dualpipe_ours.rows_dualpipe import dualpipe_place, dualpipe_rows
from dualpipe_ours.rows_dualpipev import dualpipev_place, dualpipev_rows
from dualpipe_ours.rows_gpipe import gpipe_rows
from dualpipe_ours.rows_zb_h1 import zb_h1_rows

ONE_WAY = {"gpipe": gpipe_rows, "1f1b": one_f_one_b_rows, "zero_bubble_h1": zb_h1_rows}


def text(program):
    return [" ".join(map(str, row)) for row in program.ranks]


def test_rows_are_the_library_s():
    for p in range(1, 6):
        for m in range(1, 9):
            for name, rows in ONE_WAY.items():
                assert rows(p, m) == text(schedules.build(name, p, m)), (name, p, m)
    for p in (2, 4, 6):
        for m in range(2 * p, 2 * p + 6, 2):
            assert dualpipe_rows(p, m) == text(schedules.dualpipe(p, m))
    for p in (1, 2, 3):
        for m in range(2 * p, 2 * p + 4):
            assert dualpipev_rows(p, m) == text(schedules.dualpipev(p, m))


def test_messages_stand_beside_what_needs_and_makes_them():
    row, place = dualpipe_rows(2, 4)[0], dualpipe_place(2, 4)
    assert with_messages(row, 0, place, 2).startswith("0F0 0SEND_F0 1RECV_F2 1F2 0F1 0SEND_F1 1B2 1SEND_B2 1RECV_F3")
    v, place = dualpipev_rows(1, 2)[0], dualpipev_place(1)
    assert with_messages(v, 0, place, 2) == v


def test_every_part_has_its_place_in_the_picture_and_in_a_run():
    assert sorted(part for parts in FAMILIES.values() for part in parts) == sorted(PARTS)
    assert {part for parts in RUNS.values() for part in parts} == set(PARTS)
    assert len(SHORT_WAY) == 12
    assert set(SHORT_WAY) < set(PARTS)


def test_what_a_stage_keeps():
    assert rank_bytes(10, 4, 8, 100, 3) == 8 * (10 + 10 + 3 + 3) + 300


def test_earlier_parts_import_no_later_one():
    order = list(PARTS)
    for number, name in enumerate(order):
        source = Path(dualpipe_ours.__file__).with_name(f"{name}.py").read_text()
        imported = set(re.findall(r"^from \.(\w+) import", source, re.MULTILINE))
        assert imported <= set(order[:number]), name
        of_comm = re.findall(r"^from dualpipe_lab\.comm import (.*)$", source, re.MULTILINE)
        assert set(", ".join(of_comm).split(", ")) <= {"", "get_rank", "get_world_size", "isend", "irecv", "Work"}, name
    assert {path.stem for path in Path(dualpipe_ours.__file__).parent.glob("[a-z]*.py")} == {*order, "plain_model"}


def test_parts_import_of_each_other_what_the_contract_names():
    for part in PARTS:
        source = Path(dualpipe_ours.__file__).with_name(f"{part}.py").read_text()
        for other, names in re.findall(r"^from \.(\w+) import (.+)$", source, re.MULTILINE):
            assert set(names.split(", ")) <= set(part_check(other).names), (part, other)
