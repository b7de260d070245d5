"""Bytes between hosts, counted in the sockets, beside those that the ledger derives and a plan predicts; a slow host.

On each host are two ranks.  GLOO's headers are on top of what is derived: 48 bytes for each of its messages.
"""

import json
import re
from functools import cache
from pathlib import Path
from statistics import median

import pytest
import torch
from runs import A1, draw
from torchrun_cases import crossing

import dualpipe_lab as lab
from dualpipe_lab import data, ep, models, train
from dualpipe_lab.world.emulate import hosts
from dualpipe_lab.world.record import wire

pytestmark = pytest.mark.slow
HEADERS = 2_000  # bytes of GLOO's, for each call and rank
SIZES = {"hidden_size": 64, "ffn_size": 128, "num_heads": 8, "num_kv_heads": 4}
LLAMA = models.LlamaConfig(**SIZES, num_layers=8)
SHORT = models.LlamaConfig(**SIZES, num_layers=2)
V3 = models.V3MoEConfig(**SIZES, num_layers=4, expert_ffn_size=32, num_experts=8, num_groups=4, balance=1e-2)
OPTIONS = {"sequence_length": 64, "global_batch": 16, "max_norm": 0.5, "bias_speed": 1e-2}


@pytest.fixture(scope="module")
def four_hosts(need_hosts):
    with hosts.network(4) as made:
        yield made


def counted(outcome):
    """By operation: calls, bytes between the hosts as derived, and those that left the sockets for the other host."""
    assert outcome.codes == [0, 0], outcome.text
    (said,) = set(re.findall(r"^COUNTED \d+ (.*)$", outcome.text, re.MULTILINE))
    return json.loads(said)


def assert_as_derived(found):
    for name, (calls, derived, on_the_wire) in found.items():
        assert 0 <= on_the_wire - derived <= 0.001 * derived + calls * HEADERS, (name, calls, derived, on_the_wire)


def assert_each_rank_sends_what_is_derived(ranks):
    """Also which rank sends it to other hosts; and some of it is so much that headers do not hide an error."""
    largest = 0
    for rank, done in enumerate(ranks):
        found = {name: (own.count, own.between_hosts(rank), own.on_the_wire) for name, own in done.items()}
        assert_as_derived(found)
        largest = max([largest, *(derived / (calls * HEADERS) for calls, derived, _ in found.values())])
    assert largest > 5, largest


def between_hosts(ranks, name=None):
    """Bytes between hosts, derived, of one operation or of all."""
    return sum(
        own.between_hosts(rank)
        for rank, done in enumerate(ranks)
        for other, own in done.items()
        if name in (None, other)
    )


def test_the_order_of_the_axes_decides_what_crosses_between_hosts(agents, four_hosts):
    """With the stages on two hosts no row of an expert crosses, and with the experts on two hosts no activation."""
    stages, experts = (
        counted(agents.run(f"wired_{axis}_across_nodes", hosts=four_hosts[:2], ranks_per_host=2))
        for axis in ("stages", "experts")
    )
    for found in (stages, experts):
        assert_as_derived(found)
    assert stages["all_to_all_single"][1] == experts["isend"][1] == 0
    assert stages["isend"][1] > 0
    assert experts["all_to_all_single"][1] > 0


@pytest.mark.drawn(1)
@pytest.mark.parametrize("num_hosts", [2, 4])
def test_every_collective_sends_between_hosts_what_is_derived(agents, four_hosts, num_hosts):
    """By every rank: GLOO's all-reduce runs round the ring the other way than its all-gather does."""
    (ranks,) = crossing.run(agents, four_hosts[:num_hosts], [("collectives", 2**18)])
    for done in ranks:
        assert set(done) == {*wire.KINDS, "irecv"}
    assert_each_rank_sends_what_is_derived(ranks)
    for name in {*wire.KINDS} - {"barrier"}:
        assert between_hosts(ranks, name) >= 2**18, name


def plan(**fields):
    return lab.Plan(precision="float64", **fields)


def wings(num_ranks):
    """Each axis over all ranks, and so over all hosts."""
    return {
        "dp": (LLAMA, plan(dp=num_ranks, zero=1)),
        "tp": (LLAMA, plan(tp=num_ranks, sequence_parallel=True)),
        "cp": (LLAMA, plan(cp=num_ranks)),
        "pp": (LLAMA, plan(pp=num_ranks, num_microbatches=8)),
        "ep": (V3, plan(ep=num_ranks)),
    }


@cache
def alone(config):
    """Losses, norms and the first raw gradients of two steps of one process."""
    result = train.reference(config, data.frozen_corpus(), 2, **OPTIONS)
    return result.losses, result.norms, result.gradients[0]


def taken(agents, hosts, cases):
    """By the case's name: what each rank found in a step under its plan, which is right in every respect."""
    found = {}
    for name, (config, chosen) in cases.items():
        (found[name],) = crossing.run(agents, hosts, [("step", config, chosen, OPTIONS, alone(config))])
        assert_right(name, found[name], alone(config)[2])
    return found


def assert_right(name, ranks, gradients):
    """Gradients, loss and norm of one process; calls and bytes as predicted; what crosses also in the sockets."""
    assert {each for one in ranks for each in one["names"]} == set(gradients), name
    for rank, one in enumerate(ranks):
        assert one["gradients"] <= A1, (name, rank, one["gradients"])
        assert one["numbers"] <= 1e-10, (name, rank)
        done = {
            each: (*own[:3], {peer: n for peer, n in own.sent_to.items() if n}) for each, own in one["done"].items()
        }
        assert done == one["predicted"], (name, rank)
    done = [one["done"] for one in ranks]
    assert between_hosts(done) == ranks[0]["between"] > 0, name
    assert_each_rank_sends_what_is_derived(done)


def test_every_axis_across_two_hosts_trains_as_one_process_and_sends_what_the_plan_says(agents, four_hosts, some):
    taken(agents, four_hosts[:2], some(wings(4), 1))


def test_plans_across_four_hosts_train_as_one_process_and_send_what_they_say(agents, four_hosts, some):
    """Each axis; and DualPipe with experts and ZeRO-1, whose experts' rows all stay on their hosts."""
    mixed = plan(pp=2, ep=2, dp=2, num_microbatches=4, schedule="dualpipe", zero=1, ranks_per_node=2)
    found = taken(agents, four_hosts, {"mixed": (V3, mixed)} | some(wings(8), 1))
    done = [one["done"] for one in found["mixed"]]
    assert between_hosts(done, "all_to_all_single") == 0 < sum(own["all_to_all_single"].sent for own in done)
    assert between_hosts(done, "isend") == sum(own["isend"].sent for own in done)  # stages are on other hosts


def test_hybrid_zero_sends_six_bytes_between_hosts_where_zero_3_sends_thirteen(agents, four_hosts):
    """With S the bytes of all weights: ZeRO-3 gathers 7 S and scatters 6 S, hybrid ZeRO sums 6 S once per step."""
    settings = {"dp": 8, "zero": 3, "ranks_per_node": 2}
    cases = {"plain": (SHORT, plan(**settings)), "hybrid": (SHORT, plan(**settings, hybrid=True))}
    found = taken(agents, four_hosts, cases)
    plain, hybrid = ([one["done"] for one in found[name]] for name in cases)
    size = 8 * SHORT.num_parameters()
    gathered = 2 * 4 * 7 * size // 8  # twice round a ring of 8, which leaves 4 hosts
    scattered = 6 * size  # a shard from each to the six on other hosts
    summed = 8 * 2 * 3 * size // (4 * 2)  # 8 ranks in rings of 4, each with half of it
    norm = between_hosts(plain, "all_reduce")
    assert between_hosts(plain, "all_gather_single") == gathered
    assert between_hosts(plain, "reduce_scatter_single") == scattered
    assert between_hosts(hybrid) == between_hosts(hybrid, "all_reduce") == summed + norm
    assert (gathered + scattered) * 6 == summed * 13


HIDDEN, FFN, EXPERTS, CHOICES, TOKENS = 64, 32, 16, 4, 8 * 48


def experts_case():
    """Tokens of 8 ranks, each with experts of at most two groups of four, some of which are chosen far more often."""
    scores = draw(0, TOKENS, EXPERTS) + 1.5 * torch.arange(EXPERTS).remainder(3) / 3
    chosen = ep.group_limited_topk(scores, CHOICES, num_groups=4, num_groups_per_token=2)
    shapes = {"x": (TOKENS, HIDDEN), "weights": (TOKENS, CHOICES), "dy": (TOKENS, HIDDEN)}
    shapes |= {"gate": (EXPERTS, FFN, HIDDEN), "up": (EXPERTS, FFN, HIDDEN), "down": (EXPERTS, HIDDEN, FFN)}
    return {name: draw(seed, *shape) for seed, (name, shape) in enumerate(shapes.items(), 1)} | {"experts": chosen}


def one_process(case):
    """The same layer, one expert after the other."""
    leaves = {name: case[name].clone().requires_grad_() for name in ("x", "weights", "gate", "up", "down")}
    x, weights, gate, up, down = leaves.values()
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, choice = (case["experts"] == expert).nonzero(as_tuple=True)
        inner = torch.nn.functional.silu(x[token] @ gate[expert].t()) * (x[token] @ up[expert].t())
        y = y.index_add(0, token, weights[token, choice, None] * (inner @ down[expert].t()))
    y.backward(case["dy"])
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def hosts_of_choices(case):
    """For each token the host of each of its choices, and its own."""
    return [
        ([expert * 4 // EXPERTS for expert in row], rank // 2)
        for rank, chosen in enumerate(case["experts"].chunk(8))
        for row in chosen.tolist()
    ]


def test_a_token_crosses_once_to_each_host(agents, four_hosts):
    """Two of DeepSeek's means: few hosts for a token, one copy to each."""
    case = experts_case()
    direct, once = crossing.run(agents, four_hosts, [("experts", case, False), ("experts", case, True)])
    expected = one_process(case)
    for ranks in (direct, once):
        assert_each_rank_sends_what_is_derived([one["done"] for one in ranks])
        for rank, one in enumerate(ranks):
            right = {name: expected[name].chunk(8)[rank] for name in ("y", "x", "weights")}
            for name in expected:
                value = right.get(name, expected[name])
                assert (one[name] - value).abs().max() <= A1 * value.abs().max(), (rank, name)
    choices = hosts_of_choices(case)
    rows = sum(host != home for where, home in choices for host in where)
    sent = between_hosts([one["done"] for one in direct])
    assert sent == 4 * rows * HIDDEN * 8 + 8 * 6 * (EXPERTS // 8) * 8  # there and back in both passes; counts
    copies = sum(len({*where} - {home}) for where, home in choices)
    found = between_hosts([one["done"] for one in once])
    assert found == copies * ((4 * HIDDEN + 2 * CHOICES) * 8 + CHOICES * 8) + 8 * 3 * 8
    assert rows > 1.5 * copies


NUM_BYTES, RATE, STEPS = 1_000_000, 40, 3  # Mbit/s
BURST = 32 * 1024  # bytes that leave at once, as `Host.slow_down` allows


def test_a_slow_host_is_seen_in_the_merged_trace_of_hosts_with_clocks_of_their_own(agents, four_hosts):
    """A message from it takes the time of its bytes; those to it, beside it and inside of it do not."""
    fast, slow = four_hosts[:2]
    slow.slow_down(f"{RATE}mbit")
    pairs = [(0, 1), (0, 2), (2, 0), (3, 1), (1, 3), (2, 3)]
    ahead = 1_000 if Path("/proc/self/timens_offsets").exists() else 0  # seconds
    folder = agents.folder / "traces"
    parts = [("clock",), ("messages", str(folder), pairs, NUM_BYTES, STEPS)]
    try:
        estimates, _ = crossing.run(agents, [fast, slow], parts, kind="parts", ahead=ahead)
    finally:
        slow.run("tc", "qdisc", "del", "dev", hosts.INTERFACE, "root")
    for rank, (offset, error) in enumerate(estimates):
        assert abs(offset + rank // 2 * ahead * 10**9) <= error, (rank, offset, error)
    found = lab.read_traces(folder)
    matching = found.matching()
    assert (len(matching.messages), matching.lost, matching.truncated) == (len(pairs) * STEPS, [], 0)
    assert matching.early_ns == 0
    assert all(message.arrived >= message.sent for message in matching.messages)
    bound = int(re.search(r", clocks within (\d+) us$", found.timeline().name)[1]) * 1_000
    least = (NUM_BYTES - BURST) * 8 * 1_000 // RATE  # nanoseconds
    assert bound < least / 4
    for pair in pairs:
        took = [m.arrived - m.sent for m in matching.messages if (m.src, m.dst) == pair]
        assert len(took) == STEPS
        if pair[0] >= 2 > pair[1]:
            assert min(took) >= least - bound, (pair, took)
            assert min(took) <= 2 * least + bound, (pair, took)
        else:
            assert median(took) < least / 2, (pair, took)
