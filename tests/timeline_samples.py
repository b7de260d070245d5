"""Programs and costs on which the tests of timelines and of their pictures agree."""

import json
from fractions import Fraction
from pathlib import Path

from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.schedules import gpipe, one_f_one_b

ORACLES = json.loads((Path(__file__).parent / "oracles" / "programs.json").read_text())
DUALPIPE = Program.parse("DualPipe", ORACLES["dualpipe 8 ranks 20 microbatches"])
ZBV = Program.parse("ZBV", ORACLES["zbv 4 ranks 8 microbatches (torch)"])
SVG = "{http://www.w3.org/2000/svg}"
PROGRAMS = [gpipe(4, 8), one_f_one_b(4, 8), one_f_one_b(1, 1), DUALPIPE, ZBV, one_f_one_b(8, 200)]
COSTS = [Cost(), Cost(F=2, I=3, W=1, overlap=5, latency=1, transfer=2), Cost(F=Fraction(1, 3), transfer=Fraction(5, 2))]
