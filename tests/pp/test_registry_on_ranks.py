"""Every schedule of the registry on real ranks: gradients bit for bit, simulated times, traffic, memory."""

import pytest
from rank_runs import BYTES, bitwise, expected_grads, make_batch, run_all
from schedule_grid import legal, num_crossings

import dualpipe_lab as lab
from dualpipe_lab.pp import schedules

F = {stage: 3_000_000 + 100_000 * stage for stage in range(24)}  # unequal stages
COST = lab.Cost(F=F, I=3_500_000, W=2_000_000, overlap=7_000_000, latency=500_000, transfer=96_000)
LINK = lab.Link(gbps=0.008, latency_ms=0.5)  # 96 bytes take 96 us
MICROBATCHES = {1: (1, 2, 5), 2: (1, 5, 6), 4: (2, 10), 8: (16,)}


def programs(num_ranks):
    sizes = [(num_ranks, number) for number in MICROBATCHES[num_ranks]]
    options = [(name, {}) for name in schedules.names()]
    options += [("interleaved", {"num_virtual_stages": 3}), ("zero_bubble_h1", {"num_virtual_stages": 2})]
    options += [("zero_bubble_h2", {"in_flight": num_ranks + 1})]
    found = [program for name, more in options for program in legal(name, sizes, **more)]
    return [*found, lab.lower(schedules.build("1f1b", num_ranks, sizes[-1][1]))]


@pytest.mark.parametrize("num_ranks", [2, 4, *(pytest.param(number, marks=pytest.mark.every) for number in (1, 8))])
def test_gradients_times_traffic_and_memory(num_ranks):
    chosen = programs(num_ranks)
    assert len({program.name for program in chosen}) >= len(schedules.names()) - 2 * (num_ranks == 1)
    out, results = run_all(chosen, num_ranks, cost=COST, clock="virtual", link=LINK)
    began = [ranks[0][-1] for ranks in results]
    for program, ranks, start, end in zip(chosen, results, began, [*began[1:], 10**18], strict=True):
        batch = make_batch(program.num_microbatches)
        expected, loss = expected_grads(program, batch)
        for (grads, *_), theirs in zip(ranks, expected, strict=True):
            assert grads.keys() == theirs.keys()
            assert all(bitwise(grads[stage], theirs[stage]) for stage in grads), program
        losses = {m: part for _, parts, *_ in ranks for m, part in parts.items()}
        assert sorted(losses) == list(range(program.num_microbatches))
        assert sum(losses.values()) == pytest.approx(loss, abs=1e-12)
        simulated = lab.simulate(program, COST, unit="ns")
        assert out.timeline.between(start, end).steps() == [simulated], program
        assert [peak for _, _, peak, _, _ in ranks] == [simulated.peak_activations(r) for r in range(num_ranks)]
    crossings = sum(map(num_crossings, chosen))
    assert out.ledger.count("isend") == out.ledger.count("irecv") == 2 * crossings
    assert out.ledger.sent("isend") == 2 * crossings * BYTES
