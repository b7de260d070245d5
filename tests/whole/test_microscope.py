"""One composition of each kind of torch's parallel parts, as `benchmarks/microscope.py` compares them."""

from pathlib import Path

import pytest
import torch
from scripts import load

microscope = load(Path(__file__).parents[2] / "benchmarks" / "microscope.py")
EQUAL = (
    "DDP x clipping",
    "FSDP2 x accumulation",
    "FSDP2 on 4 ranks x DCP x tensor parallelism on 2 x 2",
    "TP x loss over the sharded vocabulary x ignored targets",
    "FSDP2 x TP x sequence parallelism",
    "pipeline DualPipeV x FSDP2",
)
DIFFERS = {  # and by what, on the torch that is pinned
    "EP x DDP": "2 times the right one",
    "pipeline 1F1B x a summed loss": "0.25 times the right one",
    "pipeline InterleavedZeroBubble x DDP": "",
}
PINNED = torch.__version__.startswith("2.13")


@pytest.mark.parametrize("name", EQUAL)
def test_what_torch_composes_is_as_in_one_process(name):
    assert microscope.examine(microscope.CASES[name])[:2] == ("equal", "")


@pytest.mark.skipif(not PINNED, reason="which defects a torch has depends on its version")
@pytest.mark.parametrize(("name", "detail"), DIFFERS.items())
def test_known_defects_of_the_pinned_torch_are_seen(name, detail):
    word, found, _ = microscope.examine(microscope.CASES[name])
    assert word == "differs"
    assert found.endswith(detail)
