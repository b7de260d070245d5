"""Clusters: efficiencies as curves, seconds of one piece of work, and files that are read as they were written."""

import json
from dataclasses import replace
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_lab import plan as planner
from dualpipe_lab.plan import CLUSTERS, Accelerator, Cluster, Efficiency, LinkClass

POINTS = ((1e3, 0.25), (1e6, 0.5), (1e9, 0.75))
CURVE = Efficiency(origin="measured", points=POINTS)
parts = st.floats(1e-6, 1.0)
sizes = st.lists(st.floats(1.0, 1e15), min_size=1, max_size=8, unique=True).map(sorted)
curves = sizes.flatmap(
    lambda found: st.lists(parts, min_size=len(found), max_size=len(found)).map(
        lambda values: Efficiency(origin="quoted", points=tuple(zip(found, values, strict=True)))
    )
)


def test_a_curve_passes_its_points_is_linear_in_the_logarithm_and_constant_beyond():
    assert [CURVE.at(size) for size, _ in POINTS] == [part for _, part in POINTS]
    assert CURVE.at(10**4.5) == pytest.approx(0.375)
    assert CURVE.at(1e7) == pytest.approx(0.5 + 0.25 * log(10) / log(1000))
    assert (CURVE.at(0), CURVE.at(1), CURVE.at(1e30)) == (0.25, 0.25, 0.75)
    assert (CURVE.value, Efficiency(0.3).at(5)) == (0.75, 0.3)
    assert Efficiency(0.75, "measured", POINTS) == CURVE


@given(curves, st.floats(0, 1e18), st.floats(1, 10))
def test_a_curve_stays_between_its_neighbours(curve, size, factor):
    inside = [part for _, part in curve.points]
    assert min(inside) - 1e-12 <= curve.at(size) <= max(inside) + 1e-12
    if inside == sorted(inside):
        assert curve.at(size) <= curve.at(size * factor) + 1e-12
    assert curve.value == inside[-1]


def test_what_is_measured_is_predicted_at_its_points():
    card = Accelerator("card", {"float32": 1e12}, 2**30, 1e10, efficiency=CURVE, overhead=1e-5, memory_efficiency=CURVE)
    assert card.product_seconds(1e9) == pytest.approx(1e-5 + 1e9 / 0.75e12, rel=1e-15)
    assert card.elementwise_seconds(1e6) == pytest.approx(1e-5 + 1e6 / 0.5e10, rel=1e-15)
    assert LinkClass("rail", 1e9, 1e-6, efficiency=CURVE).seconds(1e3) == pytest.approx(1e-6 + 1e3 / 0.25e9, rel=1e-15)
    other = replace(card, peaks={"float32": 1e12, "float64": 2e12}, efficiencies={"float64": Efficiency(0.1)})
    assert other.product_seconds(1e9, "float64") == pytest.approx(1e-5 + 1e9 / 0.2e12)
    assert other.product_seconds(1e9) == card.product_seconds(1e9, "float32")


def test_the_table_quotes_its_efficiencies_with_their_source():
    for accelerator, _, inside, between in CLUSTERS.values():
        for found in (accelerator.efficiency, accelerator.memory_efficiency, inside.efficiency, between.efficiency):
            assert found.origin == "quoted"
            assert found.source
    h100 = Cluster.of("h100", 8)
    assert [h100.accelerator.efficiency.at(size) for size in (1e9, 16e9, 128e9)] == [0.6, 0.9, 0.95]
    assert h100.accelerator.product_seconds(1e12) == 1e12 / (989.4e12 * 0.95)
    assert h100.inside.seconds(450e9 * 0.65) == pytest.approx(1 + 10e-6)
    assert h100.between.seconds(50e9 * 0.9) == pytest.approx(1 + 20e-6)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_file_is_read_as_it_was_written(name, tmp_path):
    cluster = Cluster.of(name, 144)
    cluster.to_file(tmp_path / "cluster.json")
    assert Cluster.from_file(tmp_path / "cluster.json") == cluster
    assert Cluster.from_file(str(tmp_path / "cluster.json")) == cluster


@given(curves, st.floats(1e6, 1e17), st.floats(1e4, 1e14), st.floats(0, 1))
def test_every_number_survives_a_file(tmp_path_factory, curve, peak, rate, seconds):
    path = tmp_path_factory.mktemp("clusters") / "cluster.json"
    card = Accelerator(
        "é", {"float32": peak, "x": 1e9}, 2**30, rate, "s", "2026-05", curve, seconds, curve, {"x": curve}
    )
    cluster = Cluster(card, 4, 2, LinkClass("a", rate, seconds, "b", curve), LinkClass("c", 1e9))
    cluster.to_file(path)
    assert Cluster.from_file(path) == cluster


def written(tmp_path, change):
    """A file of a cluster with a change of its values; its path."""
    path = tmp_path / "cluster.json"
    Cluster.of("h100", 8).to_file(path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return path


def test_what_has_a_default_may_be_missing(tmp_path):
    def shorten(values):
        del values["about"]
        values["inside"] = {"name": "a", "bandwidth": 1e9}
        values["accelerator"] = {
            "name": "b",
            "peaks": {"bfloat16": 1e12},
            "memory_bytes": 8e10,
            "memory_bandwidth": 1e12,
        }

    found = Cluster.from_file(written(tmp_path, shorten))
    assert found.inside == LinkClass("a", 1e9)
    assert found.accelerator == Accelerator("b", {"bfloat16": 1e12}, 80_000_000_000, 1e12)
    assert isinstance(found.accelerator.memory_bytes, int)


def setting(path, value):
    """A change of a cluster's values: the field at a path gets a value; None takes it away."""

    def change(values):
        *folders, name = path.split(".")
        for folder in folders:
            values = values[folder]
        values[name] = value
        if value is None:
            del values[name]

    return change


BAD_FILES = [
    ("num_rank", 8, "a cluster has no field 'num_rank', the nearest is num_ranks; it has accelerator"),
    ("accelerator.peak", {}, "accelerator has no field 'peak', the nearest is peaks"),
    ("inside.latency_us", 1, "inside has no field 'latency_us', the nearest is latency"),
    ("accelerator.efficiency.point", 1, "accelerator.efficiency has no field 'point', the nearest is points"),
    ("between", None, "a cluster needs the field between, got none"),
    ("accelerator.peaks", None, "accelerator needs the field peaks, got none"),
    ("accelerator.name", None, "accelerator needs the field name, got none"),
    ("accelerator", 3, "accelerator is an object of fields in braces, got 3"),
    ("accelerator.peaks", [1], "accelerator.peaks is an object of fields in braces, got [1]"),
    ("accelerator.peaks", {}, "H100 SXM needs a peak for a type of number"),
    ("accelerator.peaks.bfloat16", 989.4, "is 989.4 FLOP/s, less than there is; if these are TFLOP/s, write 9.894e+14"),
    ("accelerator.peaks.bfloat16", 989.4e15, "is 9.894e+17 FLOP/s, and one rank has at most 1e+17; write"),
    ("accelerator.peaks.bfloat16", -1, "peaks.bfloat16 is a number of FLOP/s above 0, got -1"),
    ("accelerator.peaks.bfloat16", "fast", "peaks.bfloat16 is a number of FLOP/s, got 'fast'"),
    ("accelerator.peaks.bfloat16", float("nan"), "peaks.bfloat16 is a number of FLOP/s, got nan"),
    ("accelerator.memory_bytes", 80, "memory_bytes is 80 bytes, less than there is; if these are GB, write 8e+10"),
    ("accelerator.memory_bytes", 80e15, "one rank has at most 1e+15"),
    ("accelerator.memory_bytes", 10**29, "one rank has at most 1e+15"),
    ("accelerator.memory_bytes", 2**30 + 0.5, "a whole number of bytes, got 1073741824.5; use 1073741824"),
    ("accelerator.memory_bytes", True, "memory_bytes is a number of bytes, got True"),
    ("accelerator.memory_bandwidth", 3350, "is 3350 bytes/s, less than there is; if these are GB/s, write 3.35e+12"),
    ("accelerator.memory_bandwidth", 3.35e15, "is 3.35e+15 bytes/s, and one rank has at most 1e+14"),
    ("inside.bandwidth", 450, "inside.bandwidth is 450 bytes/s, less than there is; if these are GB/s"),
    ("inside.latency", 10, "is 10 seconds, more than there is; if these are microseconds, write 1e-05"),
    ("between.latency", -1e-6, "between.latency is a number of seconds from 0, got -1e-06"),
    ("accelerator.overhead", 5, "accelerator.overhead is 5 seconds, more than there is"),
    ("accelerator.overhead", "none", "accelerator.overhead is a number of seconds, got 'none'"),
    ("inside.name", 4, "inside.name is a text in quotes, got 4"),
    ("accelerator.date", "May", "accelerator.date is a year and month, got 'May'; such as 2026-05"),
    ("accelerator.efficiency.value", 65, "accelerator.efficiency: an efficiency is above 0 and at most 1, got 65"),
    ("accelerator.efficiency.origin", "heard", "measured, quoted, assumed, got 'heard'"),
    ("accelerator.efficiency.points", 3, "accelerator.efficiency.points is a list of [size, part of the peak]"),
    ("accelerator.efficiency.points", [[1, 0.5, 2]], "an efficiency's point is (size, part of the peak)"),
    ("accelerator.efficiency.points", [[2, 0.5], [1, 0.95]], "ascending sizes, got 2 before 1; sort them"),
    ("accelerator.efficiencies", {"int8": {"value": 0.5}}, "an efficiency for 'int8' and no peak; known are"),
    ("num_ranks", 12, "full nodes, got 12 ranks and 8 per node; use 16 ranks"),
    ("num_ranks", "8", "num_ranks to be an integer of at least 1, got '8'"),
]


@pytest.mark.parametrize(("path", "value", "words"), BAD_FILES)
def test_a_bad_field_is_refused_with_what_it_probably_meant(path, value, words, tmp_path):
    with pytest.raises(ValueError, match=r".") as found:
        Cluster.from_file(written(tmp_path, setting(path, value)))
    assert words in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"num_ranks": 8,\n"inside" 3}', "cluster.json, line 2: not JSON, Expecting ':' delimiter"),
        (b"[1]", "a cluster is an object of fields in braces, got [1]"),
        (b"\xff\xfe", "is not a text in UTF-8"),
        (
            b'{"num_ranks": 1' + 400 * b"0" + b"}",
            "a number has at most 30 digits, got 401; write it",
        ),
        (b'{"num_ranks": 8, "num_ranks": 9}', "the field num_ranks stands twice in one object; keep one"),
    ],
)
def test_what_is_no_cluster_is_refused(content, words, tmp_path):
    path = tmp_path / "cluster.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r".") as found:
        Cluster.from_file(path)
    assert words in str(found.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Cluster.of("h100", 8, 0), "ranks_per_node to be an integer of at least 1, got 0"),
        (lambda: Cluster.of("h100", "8"), "num_ranks to be an integer of at least 1, got '8'"),
        (lambda: Efficiency(0.0), "above 0 and at most 1, got 0.0"),
        (lambda: Efficiency(points=((1, 1.5),)), "above 0 and at most 1, got 1.5"),
        (lambda: Efficiency(points=((0, 0.5),)), "a size above 0, got 0"),
        (lambda: Efficiency(points=((1, 0.5), (1, 0.6))), "ascending sizes, got 1 before 1"),
        (lambda: Efficiency(0.4, points=((1, 0.5),)), "that of its largest size, 0.5, got 0.4; leave value out"),
        (lambda: Efficiency(points=("ab",)), "an efficiency's point is (size, part of the peak), got 'ab'"),
        (lambda: CURVE.at(-1), "an efficiency needs a size from 0, got -1"),
        (lambda: CURVE.at(float("nan")), "an efficiency needs a size from 0, got nan"),
        (lambda: Accelerator("X", {"a": 1.0}, 1, 1, overhead=-1.0), "overhead is a number of seconds from 0, got -1.0"),
        (lambda: Accelerator("X", {"a": 1.0}, 1, 1).product_seconds(1, "b"), "X has no peak for 'b', only for a"),
    ],
)  # fmt: skip
def test_bad_curves_and_questions_are_refused(make, words):
    with pytest.raises(ValueError, match=r".") as found:
        make()
    assert words in str(found.value)


def test_an_estimate_reads_a_cluster_of_a_file(tmp_path):
    Cluster.of("h100", 8).to_file(tmp_path / "cluster.json")
    cluster = Cluster.from_file(tmp_path / "cluster.json")
    from dualpipe_lab.models import LlamaConfig

    found = planner.estimate(LlamaConfig(), planner.Plan(dp=8), cluster, 32, 8)
    assert found.fits
