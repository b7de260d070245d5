"""Cross-entropy over a cut vocabulary: the oracle's cases, those that go wrong, its messages."""

import json

import pytest
import torch
from runs import ORACLES, RANKS, assert_a1, assert_refused, counted, distances, draw, kept, launch, leaf, rounding
from torch.nn import functional
from tp_runs import TOKENS, tensor

from dualpipe_lab import comm
from dualpipe_lab.tp.closed_forms import cross_entropy_bytes, gather_ratio
from dualpipe_lab.tp.cross_entropy import cross_entropy
from dualpipe_lab.tp.lm_head import LMHead
from dualpipe_lab.tp.shard import Shard, TensorParallel, full_state_dict, full_tensor, load_full_state_dict

CASES = {case["name"]: case for case in json.loads((ORACLES / "vocab_ce.json").read_text())["cases"]}
IGNORE = -100


def logits_of(case):
    return tensor(case["logits"] if "logits" in case else CASES[case["logits_of"]]["logits"])


def ours(logits, targets, tp=None, **options):
    """Loss and the whole gradient of the logits."""
    tp = tp or TensorParallel()
    start, stop = tp.span(logits.shape[-1])
    part = leaf(logits[..., start:stop])
    loss = cross_entropy(part, targets, logits.shape[-1], tp, **options)
    loss.sum().backward()
    shard = Shard(logits.dim() - 1, start, stop, logits.shape[-1])
    return {"loss": loss.detach(), "dlogits": full_tensor(part.grad, shard, tp.group)}


def plain(logits, targets):
    logits = leaf(logits)
    loss = functional.cross_entropy(logits, targets)
    loss.backward()
    return {"loss": loss.detach(), "dlogits": logits.grad}


ORACLE_OPTIONS = {
    "sum_reduction": {"reduction": "sum"},
    "label_smoothing_0.1": {"label_smoothing": 0.1},
}
PLAIN = [name for name in CASES if "logits" in CASES[name] and "H" not in CASES[name]]


@pytest.mark.parametrize("world_size", RANKS)
def test_the_oracle_s_cases(world_size):
    def fn(rank, world_size):
        found = {}
        for name in [*PLAIN, *ORACLE_OPTIONS]:
            case = CASES[name]
            results = ours(logits_of(case), torch.tensor(case["labels"]), **ORACLE_OPTIONS.get(name, {}))
            expected = {key: tensor(case["expected"][key]) for key in results if key in case["expected"]}
            assert "loss" in expected
            found[name] = distances({key: results[key] for key in expected}, expected)
        case = CASES["all_ignored_mean_is_nan"]
        results = ours(logits_of(case), torch.tensor(case["labels"]))
        found["ignored"] = {key: float(value.abs().max()) for key, value in results.items()}
        case = CASES["lm_head_plus_ce_t3"]
        weight = tensor(case["W"])
        head = LMHead(weight.shape[1], len(weight), dtype=torch.float64)
        load_full_state_dict(head, {"weight": weight})
        hidden = leaf(tensor(case["H"]))
        loss = head.loss(hidden, torch.tensor(case["labels"]))
        loss.backward()
        results = {"loss": loss.detach(), "dH": hidden.grad, "dW": full_state_dict(head, of="grad")["weight"]}
        found["head"] = distances(results, {key: tensor(case["expected"][key]) for key in results})
        return found

    assert_a1(launch(fn, world_size))


def test_large_logits_and_16_bits():
    """Logits of +-8192 on different ranks need the maximum of all; bf16 logits are summed in fp32."""

    def fn(rank, world_size):
        targets = torch.tensor([0, 36, 5])
        large = torch.zeros(3, 37, dtype=torch.float64)
        large[0, 36], large[1, 0], large[2] = 8192, -8192, 8192
        found = {"large": distances(ours(large, targets), plain(large, targets))}
        narrow = (draw(1, 3, 37) * 4).bfloat16()
        exact, mine = plain(narrow.double(), targets), ours(narrow, targets)
        assert mine["loss"].dtype == torch.float32
        # 37 exponentials, each of a difference of logits, are summed; three tokens are averaged
        size = float(narrow.double().abs().max())
        assert (mine["loss"] - exact["loss"]).abs() < rounding(torch.float32, 37 + 3, size)
        assert mine["dlogits"].dtype == torch.bfloat16
        assert (mine["dlogits"] - exact["dlogits"]).abs().max() < 2**-9  # half a step of the numbers below 1
        return found

    assert_a1(launch(fn, 3))


@pytest.mark.parametrize("world_size", [4])
def test_three_numbers_per_token_travel_and_none_in_the_backward(world_size):
    vocabulary, tokens = 32, 24

    def fn(rank, world_size):
        tp, found = TensorParallel(), {}
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            part = leaf(draw(1, tokens, vocabulary // world_size).to(dtype))
            for smoothing in (0.0, 0.1):
                targets, losses = torch.zeros(tokens, dtype=torch.int64), []

                def forward(part=part, smoothing=smoothing, targets=targets, losses=losses):
                    losses.append(cross_entropy(part, targets, vocabulary, tp, label_smoothing=smoothing))

                found[dtype, smoothing] = counted(forward), counted(losses[0].backward)
            whole = torch.empty(tokens * vocabulary, dtype=dtype)
            found[dtype] = counted(lambda whole=whole, part=part: comm.all_gather_single(whole, part.detach().view(-1)))
        return found

    for found in launch(fn, world_size):
        for dtype, width in ((torch.float32, 4), (torch.bfloat16, 4), (torch.float64, 8)):
            for smoothing, numbers in ((0.0, 3), (0.1, 4)):
                sent = cross_entropy_bytes(tokens, world_size, numbers, width)
                assert found[dtype, smoothing] == ({"all_reduce": (2, sent)}, {})
            gathered = found[dtype]["all_gather_single"][1]
            sent = found[dtype, 0.0][0]["all_reduce"][1]
            assert gathered == gather_ratio(vocabulary, dtype.itemsize, width) * sent


def test_only_the_logits_and_two_numbers_per_token_are_kept():
    def fn(rank, world_size):
        logits = leaf(draw(1, TOKENS, 20 // world_size))
        targets = torch.zeros(TOKENS, dtype=torch.int64)
        saved = kept(lambda: cross_entropy(logits, targets, 20, reduction="none"))
        return sorted(value.numel() for value in saved if value.data_ptr() != logits.data_ptr())

    assert launch(fn, 2) == [[TOKENS] * 3] * 2  # the targets, the largest logit, the log of the sum


def test_wrong_targets_and_logits_are_refused():
    cases = [
        (lambda: cross_entropy(torch.zeros(2, 4), torch.tensor([0, 8]), 8), "targets run from 0 to 7, got 8"),
        (lambda: cross_entropy(torch.zeros(2, 4), torch.tensor([-1, 1]), 8), "got -1; only -100 is ignored"),
        (lambda: cross_entropy(torch.zeros(2, 7), torch.tensor([0, 1]), 8), r"need logits of shape \(2, 4\)"),
        (lambda: cross_entropy(torch.zeros(1, 4), torch.tensor([0.0]), 8), "targets are whole numbers"),
        (lambda: cross_entropy(torch.zeros(1, 4), torch.tensor([0]), 8, reduction="avg"), "mean, sum or none"),
        (lambda: cross_entropy(torch.zeros(1, 4), torch.tensor([0]), 8, label_smoothing=1.5), "from 0 to 1, got 1.5"),
    ]
    assert_refused(2, cases)
