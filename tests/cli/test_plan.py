"""`dualpipe-lab plan`: what it prints and refuses."""

import pytest
from shell import output, run

from dualpipe_lab.plan import fits, model_of

SMALL = ("plan", "llama3.2-1b", "--gpus", 4, "--global-batch", 16, "--sequence-length", 2048)


def test_the_plans_that_fit_are_printed_as_a_table():
    expected = fits(model_of("llama3.2-1b"), 4, 40e9, sequence_length=2048, global_batch=16, count=3)
    assert output(*SMALL, "--memory", 40, "--count", 3).rstrip("\n") == str(expected)
    assert len(expected) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "llama3-70b", "--gpus", 4, "--global-batch", 16), "no plan of llama3-70b on 4 GPUs fits into 80 GB"),
        (("plan", "lama3-8b", "--gpus", 4), "the nearest known model is llama3-8b"),
    ],
)
def test_what_is_impossible_is_refused_in_one_line(arguments, words):
    refused = run(*arguments)
    assert refused.exit_code == 1
    assert words in refused.stderr
    assert refused.stderr.count("\n") == 1
