"""Bytes between two hosts, counted in the sockets, beside those that the ledger derives and a plan predicts."""

import json
import re

import pytest

from dualpipe_lab.world.record import wire

pytestmark = pytest.mark.slow
HEADERS = 2_000  # bytes of GLOO's, for each call and rank


def counted(outcome):
    """By operation: calls, bytes between the hosts as derived, and those that left the sockets for the other host."""
    assert outcome.codes == [0, 0], outcome.text
    (said,) = set(re.findall(r"^COUNTED \d+ (.*)$", outcome.text, re.MULTILINE))
    return json.loads(said)


def assert_as_derived(found):
    for name, (calls, derived, on_the_wire) in found.items():
        assert 0 <= on_the_wire - derived <= 0.001 * derived + calls * HEADERS, (name, calls, derived, on_the_wire)


def test_every_collective_sends_between_hosts_what_is_derived(agents, two_hosts):
    found = counted(agents.run("wired_collectives", hosts=two_hosts, ranks_per_host=2))
    assert set(found) == {*wire.KINDS, "irecv"}
    assert all(derived > 0 for name, (_, derived, _) in found.items() if name not in ("irecv", "barrier"))
    assert_as_derived(found)


def test_the_order_of_the_axes_decides_what_crosses_between_hosts(agents, two_hosts):
    """With the stages on two hosts no row of an expert crosses, and with the experts on two hosts no activation."""
    stages, experts = (
        counted(agents.run(f"wired_{axis}_across_nodes", hosts=two_hosts, ranks_per_host=2))
        for axis in ("stages", "experts")
    )
    for found in (stages, experts):
        assert_as_derived(found)
    assert stages["all_to_all_single"][1] == experts["isend"][1] == 0
    assert stages["isend"][1] > 0
    assert experts["all_to_all_single"][1] > 0
