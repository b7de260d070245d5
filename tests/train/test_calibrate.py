"""Calibration: known machines are recovered from their seconds, residuals are those of the rows.

No test says how long anything takes: what is measured here is checked for its structure alone.
"""

import json
import platform
import re
import socket
from dataclasses import replace
from math import isclose
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import dualpipe_lab as lab
from dualpipe_lab import models
from dualpipe_lab.plan import Accelerator, Cluster, Efficiency, LinkClass
from dualpipe_lab.train import Calibration, calibrate
from dualpipe_lab.train.calibration import KINDS, Machine, Work, predict
from dualpipe_lab.train.calibration_fit import fit
from dualpipe_lab.train.calibration_kernels import kernels_of
from dualpipe_lab.train.calibration_work import seconds_of
from dualpipe_lab.world.operating_system import host_memory_bytes, processor_name

MACHINE = Machine("machine", 2**33, 2, "rail", "2026-05")
KERNELS = (("elementwise", 3e5, 100), ("elementwise", 4e6, 20), ("product", 1e7, 30))
BIGGER = (("elementwise", 5e6, 120), ("product", 3e8, 30))


def machine(overhead=3e-6, latency=20e-6, **changes):
    """A machine whose numbers are known."""
    flat = Efficiency(origin="measured", points=((1e4, 1.0), (1e9, 1.0)))
    unit = {"peaks": {"float32": 8e10, "bfloat16": 3e9}, "efficiency": flat, "memory_efficiency": flat} | changes
    card = Accelerator("machine", unit.pop("peaks"), 2**33, 4e10, overhead=overhead, **unit)
    link = LinkClass("rail", 2e9, latency)
    return Cluster(card, 2, 2, link, link)


def works():
    products = [2.0 * side**3 for side in (16, 32, 64, 128, 256)]
    found = [Work("product", kind, "", size) for kind in ("float32", "bfloat16") for size in products]
    found += [Work("product", "float32", "", 1.5 * size, True) for size in products[:-1]]
    found += [Work("elementwise", "float32", "", 4.0**power) for power in range(7, 13)]
    found += [Work("message", "float32", "", 4.0**power, power == 8) for power in range(5, 12)]
    found += [Work("all-reduce", "float32", "", 1e6, True)]
    return [
        *found,
        Work("layer", "float32", "a", 3e8, False, KERNELS),
        Work("layer", "float32", "b", 9e9, True, BIGGER),
    ]


def timed(cluster, in_layers=0.0):
    """The seconds of all work on a known machine, whose kernels take `in_layers` more in a layer."""
    number = {KERNELS: 150, BIGGER: 150, (): 0}
    return {work: predict(work, cluster) + in_layers * number[work.kernels] for work in works()}


def test_a_known_machine_is_recovered_from_its_seconds():
    found = Calibration.of(timed(machine(), 40e-6), MACHINE, 7)
    unit, link = found.cluster.accelerator, found.cluster.inside
    assert found.alone == pytest.approx(3e-6, rel=1e-6)
    assert unit.overhead == pytest.approx(43e-6, rel=1e-6)
    assert unit.peaks == pytest.approx({"float32": 8e10, "bfloat16": 3e9}, rel=1e-6)
    assert unit.memory_bandwidth == pytest.approx(4e10, rel=1e-6)
    assert (link.latency, link.bandwidth) == pytest.approx((20e-6, 2e9), rel=1e-6)
    for curve in (unit.efficiency, *unit.efficiencies.values(), unit.memory_efficiency, link.efficiency):
        assert curve.origin == "measured"
        assert [part for _, part in curve.points] == pytest.approx([1.0] * len(curve.points), rel=1e-6)
    assert found.residual().worst < 1e-6
    assert (unit.name, unit.memory_bytes, unit.date, found.cluster.num_ranks) == ("machine", 2**33, "2026-05", 2)


def test_a_known_curve_is_recovered_at_its_sizes_and_tested_between_them():
    sizes = [2.0 * side**3 for side in (16, 32, 64, 128, 256)]
    parts = (0.25, 0.25, 0.5, 0.75, 1.0)
    curve = Efficiency(origin="measured", points=tuple(zip(sizes, parts, strict=True)))
    found = Calibration.of(timed(machine(efficiency=curve)), MACHINE)
    assert dict(found.cluster.accelerator.efficiency.points) == pytest.approx(dict(curve.points), rel=1e-6)
    assert found.residual("product").worst < 1e-6
    ascending = [predict(replace(works()[0], size=size), found.cluster) for size in (1e3, 1e4, 1e5, 1e6, 1e7, 1e9)]
    assert ascending == sorted(ascending)
    halved = {work: value / (2 if work.held_out else 1) for work, value in timed(machine(efficiency=curve)).items()}
    tested = Calibration.of(halved, MACHINE)
    assert tested.cluster == found.cluster, "what is held out changes no number"
    assert tested.residual("product").median == pytest.approx(1.0, rel=1e-6)


@given(st.floats(0, 1e-4), st.floats(1e8, 1e15), st.integers(2, 9))
def test_overhead_and_rate_are_recovered(overhead, rate, number):
    first = max(1.0, rate * overhead / 10)
    seconds = {first * 4**step: overhead + first * 4**step / rate for step in range(number)}
    found = fit(seconds)
    assert found.overhead == pytest.approx(overhead, rel=1e-6, abs=1e-9 * max(seconds.values()))
    assert found.rate == pytest.approx(rate, rel=1e-6)


@given(st.dictionaries(st.floats(1, 1e12), st.floats(1e-7, 1e2), min_size=2, max_size=9))
def test_a_fit_has_parts_of_the_best_rate_and_passes_every_size_that_tells_one(seconds):
    found = fit(seconds)
    assert 0 <= found.overhead <= min(seconds.values())
    assert max(part for _, part in found.points) == 1.0
    assert all(0 < part <= 1 for _, part in found.points)
    for size, part in found.points:
        if seconds[size] - found.overhead >= 0.1 * seconds[size]:
            assert isclose(found.overhead + size / (found.rate * part), seconds[size], rel_tol=1e-9)


def test_one_slow_small_size_does_not_become_everyone_s_overhead():
    seconds = {10.0**power: 1e-6 + 10.0**power / 1e9 for power in range(2, 7)}
    disturbed = seconds | {100.0: 1e-3}
    assert fit(disturbed).overhead <= seconds[1000.0]
    assert fit(disturbed).rate == pytest.approx(1e9, rel=0.2)


@pytest.mark.parametrize("seconds", [{}, {1: 1.0}, {1: 1.0, 2: 0.0}, {0: 1.0, 2: 1.0}, {1: 1.0, 2: float("nan")}])
def test_a_fit_needs_two_sizes(seconds):
    with pytest.raises(ValueError, match=r"seconds above 0 of two sizes or more, got .*; measure more"):
        fit(seconds)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("product", "matrix products of two sizes or more, got none"), ("elementwise", "two sizes or more, got {}")],
)
def test_a_calibration_needs_every_kind_of_work_that_computes(kind, words):
    seconds = {work: value for work, value in timed(machine()).items() if work.kind != kind}
    with pytest.raises(ValueError, match=words):
        Calibration.of(seconds, MACHINE)


def noisy():
    values = timed(machine(), 40e-6)
    return {work: value * (1 + 0.1 * (index * 7 % 5)) for index, (work, value) in enumerate(values.items())}


def test_a_residual_is_that_of_the_rows():
    found = Calibration.of(noisy(), MACHINE)
    assert {row.work for row in found.rows} == set(works())
    for row in found.rows:
        assert row.measured == noisy()[row.work]
        assert row.error == row.predicted / row.measured - 1
    for kind in ("product", "message", "layer", None):
        for held_out in (True, False):
            rows = [row for row in found.rows if row.work.held_out == held_out and kind in (None, row.work.kind)]
            errors = [abs(row.error) for row in rows]
            assert found.residual(kind, held_out) == (median(errors), max(errors), len(errors))
    assert found.residual().worst > 0.01
    with pytest.raises(ValueError, match="got no 'layers' that was held out"):
        found.residual("layers")


def test_the_table_shows_the_numbers_that_its_residuals_come_from():
    found = Calibration.of(noisy(), MACHINE, 9, processor=0.5)
    text = str(found)
    unit = {"ms": 1e-3, "us": 1e-6}
    line = r"^([\w-]+) .*? ([\d.e+]+) (us|ms) +([\d.e+]+) (us|ms) +([+-][\d.]+)% +(held out|fitted)$"
    rows = re.findall(line, text, re.MULTILINE)
    assert len(rows) == len(works())
    errors = []
    for kind, measured, first, predicted, second, error, note in rows:
        shown = float(predicted) * unit[second] / (float(measured) * unit[first]) - 1
        assert shown == pytest.approx(float(error) / 100, abs=0.012), "three digits of each"
        errors += [(kind, abs(float(error)))] if note == "held out" else []
    for kind in {kind for kind, _ in errors}:
        mine = [error for other, error in errors if other == kind]
        told = re.search(
            rf"^held out, {kind}: median ([\d.]+)%, worst ([\d.]+)% of {len(mine)} row", text, re.MULTILINE
        )
        assert [float(part) for part in told.groups()] == pytest.approx([median(mine), max(mine)], abs=0.11)
    assert "medians of 9 rounds" in text
    assert "other programs had 50% of a rank's processor" in text
    assert "other programs" not in str(replace(found, processor=1.0))


def test_one_rank_has_an_assumed_link():
    seconds = {work: value for work, value in timed(machine()).items() if work.kind not in ("message", "all-reduce")}
    found = Calibration.of(seconds, MACHINE._replace(num_ranks=1))
    assert found.cluster.inside.efficiency.origin == "assumed"
    assert found.cluster.inside.source.startswith("assumed")
    assert (
        found.cluster.accelerator == Calibration.of(timed(machine()), MACHINE._replace(num_ranks=1)).cluster.accelerator
    )


def test_a_clock_is_read_around_all_calls():
    ticks, calls = iter([5.0, 11.0]), []
    assert seconds_of(lambda: calls.append(1), 4, lambda: next(ticks)) == 1.5
    assert len(calls) == 4


def layer_on_a_rank(rank, world_size):
    config = models.LlamaConfig(19, 32, 48, 1, 4, 2)
    layer = models.Llama(config, lab.Topology([("dp", world_size)])).layers[0]
    x = torch.randn(3, 8, 32, requires_grad=True)

    def step():
        torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])

    return kernels_of(step)


def test_the_kernels_of_a_layer_have_the_flops_of_the_closed_form():
    (kernels,) = lab.launch(layer_on_a_rank, 1)
    products = sum(size * number for kind, size, number in kernels if kind == "product")
    tokens, weights = 24, 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48
    linear, attention = 2 * tokens * weights * 3, 2 * 3 * 4 * 8 * 8 * 8 * 7  # two products forward, five backward
    assert products == linear + attention
    assert {kind for kind, _, _ in kernels} == {"product", "elementwise"}


def test_products_have_torch_s_flops():
    x, w = torch.ones(5, 7), torch.ones(9, 7, requires_grad=True)

    def step():
        (x @ w.t()).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    assert (
        sum(size * number for kind, size, number in kernels_of(step) if kind == "product") == counter.get_total_flops()
    )


def test_views_are_no_kernels_and_what_is_expanded_has_the_bytes_that_it_has():
    x = torch.ones(4, 6)
    assert kernels_of(lambda: x.t().reshape(4, 6).view(24)) == (("elementwise", 192.0, 1),)
    assert kernels_of(lambda: x.view(24)[3:].unsqueeze(0).expand(5, -1)) == ()
    assert kernels_of(lambda: torch.ones(1).expand(1000) + torch.ones(1000)) == (
        ("elementwise", 4.0, 1),
        ("elementwise", 4000.0, 1),
        ("elementwise", 8004.0, 1),
    )
    assert kernels_of(lambda: x.mul_(1)) == (("elementwise", 192.0, 1),)
    batch = torch.ones(3, 4, 6)
    assert kernels_of(lambda: torch.baddbmm(torch.ones(3, 4, 4), batch, batch.mT))[-1] == ("product", 576.0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_this_machine_is_measured_and_its_file_read_by_the_planner(num_ranks, tmp_path):
    file = tmp_path / "machine.json"
    found = calibrate(num_ranks, seconds=1, precisions=("float64", "bfloat16"), file=file)
    cluster = found.cluster
    assert Cluster.from_file(file) == cluster
    assert (cluster.num_ranks, cluster.ranks_per_node) == (num_ranks, num_ranks)
    assert list(cluster.accelerator.peaks) == ["float64", "bfloat16"]
    assert (cluster.accelerator.name, cluster.accelerator.memory_bytes) == (
        processor_name(),
        host_memory_bytes() // num_ranks,
    )
    kinds = KINDS if num_ranks > 1 else ("product", "elementwise", "layer")
    assert tuple(dict.fromkeys(row.work.kind for row in found.rows)) == kinds
    assert all(row.measured > 0 and row.predicted > 0 for row in found.rows)
    assert found.num_rounds >= 3
    assert 0 < found.processor <= 1
    for kind in kinds:
        assert found.residual(kind).num_rows >= 1
    for curve in (cluster.accelerator.efficiency, cluster.accelerator.memory_efficiency):
        assert curve.origin == "measured"
        assert max(part for _, part in curve.points) == 1.0
    predicted = [predict(replace(found.rows[0].work, size=4.0**power), cluster) for power in range(5, 25)]
    assert min(predicted) >= cluster.accelerator.overhead >= found.alone >= 0
    plan = lab.Plan(dp=num_ranks, precision="bfloat16")
    assert 0 < lab.plan.step_time(models.LlamaConfig(), plan, cluster, 32, num_ranks).mfu < 1


@pytest.mark.slow
@pytest.mark.usefixtures("on_stand_in")
def test_an_accelerator_is_measured_by_the_wall_s_clock():
    found = calibrate(2, seconds=1, precisions=("float32",), threads=2, backend="nccl")
    assert found.cluster.inside.name == "NCCL within one machine"
    assert found.processor == pytest.approx(1.0, abs=1e-3), "the wall's clock does not tell it"
    assert {row.work.kind for row in found.rows} == set(KINDS)


def test_a_file_names_no_host(tmp_path):
    found = Calibration.of(timed(machine()), MACHINE._replace(name=processor_name()))
    found.cluster.to_file(tmp_path / "machine.json")
    text = (tmp_path / "machine.json").read_text()
    assert json.loads(text)["accelerator"]["name"] == processor_name()
    names = {socket.gethostname(), platform.node()} - {""}
    assert [name for name in names if re.search(rf'"[^"]*\b{re.escape(name)}\b', processor_name())] == []


def test_a_machine_has_a_processor_and_memory():
    assert processor_name() == processor_name().strip() != ""
    assert host_memory_bytes() >= 2**28
    assert isinstance(host_memory_bytes(), int)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_ranks": 0}, "calibrate starts 1 to 128 ranks, got num_ranks=0; use 2"),
        ({"num_ranks": 129}, "got num_ranks=129"),
        ({"num_ranks": 2.0}, "got num_ranks=2.0"),
        ({"num_ranks": True}, "got num_ranks=True"),
        ({"seconds": 0.5}, "calibrate takes 1 to 3600 seconds, got seconds=0.5; use 20"),
        ({"seconds": float("nan")}, "got seconds=nan"),
        ({"seconds": float("inf")}, "got seconds=inf"),
        ({"seconds": "20"}, "got seconds='20'"),
        ({"precisions": ()}, "a list of precisions, got ()"),
        ({"precisions": "float32"}, "a list of precisions, got 'float32'; such as ('float32',)"),
        ({"precisions": ("float16",)}, "each of float64, float32, bfloat16 at most once, got float16"),
        ({"precisions": ("float32", "float32")}, "at most once, got float32, float32"),
        ({"precisions": ([],)}, "at most once, got []"),
        ({"file": "/nowhere/at/all.json"}, "all.json is in a folder that does not exist; give the name of a file"),
        ({"file": "/"}, "/ is a folder; give the name of a file"),
        ({"file": ""}, "calibrate writes to a path, got file=''; such as 'machine.json'"),
        ({"file": 3}, "calibrate writes to a path, got file=3"),
        ({"threads": 0}, "threads"),
        ({"backend": "mpi"}, "backend"),
    ],
)
def test_bad_arguments_are_refused_before_a_process_starts(options, words, monkeypatch):
    def start(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr("dualpipe_lab.world.server.start", start)
    with pytest.raises(ValueError, match=r".") as found:
        calibrate(**options)
    assert words in str(found.value)
    assert "\n" not in str(found.value)
