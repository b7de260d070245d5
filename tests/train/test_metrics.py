"""Metrics: which rows are printed, by every way to start; and in a CSV file."""

import os

import pytest
from training_runs import LLAMA, plan, run

from dualpipe_lab.train.metrics import Metrics, MetricsFile, read_csv


@pytest.mark.parametrize(("every", "steps"), [(10, ["1", "7", "10", "14", "15"]), (0, [])])
def test_the_rows_that_are_due_are_printed_once(every, steps, capfd):
    """Of every so many steps one, the first, the last, and those with an evaluation."""
    options = {"evaluation": b"0123456789" * 9, "evaluate_every": 7, "log_every": every}
    run(LLAMA, plan(dp=2), steps=15, **options)
    said = capfd.readouterr()
    assert [line.split()[1] for line in said.out.splitlines()] == steps
    assert all(line.startswith("step ") for line in said.out.splitlines())
    assert "\x1b" not in said.out + said.err


def row(step):
    return Metrics(step, 1 / step, None, 1e-3, 10.0, 0.5, (1, 2), (3, 4))


def test_a_file_that_a_kill_cut_short_is_continued_without_double_rows(tmp_path):
    file = tmp_path / "deep" / "rows.csv"
    written = MetricsFile(file)
    for step in range(1, 13):
        written.write(row(step))
    file.write_text(file.read_text().rpartition("2,0.08")[0])  # the row of step 12 ends behind its first digit
    assert file.read_text().endswith("\n1")
    MetricsFile(file, first=12).write(row(12))
    read = read_csv(file)
    assert [each["step"] for each in read] == [str(step) for step in range(1, 13)]
    assert [float(each["loss"]) for each in read] == [1 / step for step in range(1, 13)]
    assert read[0]["sent_bytes"] == "2"
    assert file.read_text().startswith("step,loss,norm,lr,")
    assert os.listdir(file.parent) == ["rows.csv"]


def test_a_kill_while_the_rows_are_written_anew_loses_none(tmp_path, monkeypatch):
    file = tmp_path / "rows.csv"
    MetricsFile(file).write(row(1))
    before = file.read_text()

    def die(*names):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        MetricsFile(file, first=2)
    assert file.read_text() == before
