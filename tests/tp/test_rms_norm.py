"""RMSNorm in its three cuts: against the oracle and plain torch; who sums dgamma and who must not."""

import pytest
import torch
from runs import RANKS, assert_a1, counted, distances, draw, launch, leaf
from tp_runs import TOKENS, local, oracle, step, tensor

import dualpipe_lab as lab
from dualpipe_lab.tp.grads import sum_partial_gradients
from dualpipe_lab.tp.rms_norm import RMSNorm
from dualpipe_lab.tp.shard import TensorParallel, load_full_state_dict

DIMS = {"none": None, "tokens": -2, "hidden": -1}


def plain(x, gamma, dy, eps):
    x, gamma = leaf(x), leaf(gamma)
    y = torch.nn.functional.rms_norm(x, gamma.shape, gamma, eps)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "weight": gamma.grad}


def ours(cut, x, gamma, dy, eps, tp):
    norm = RMSNorm(len(gamma), eps, tp=tp, sharded=cut, dtype=torch.float64)
    load_full_state_dict(norm, {"weight": gamma})
    return step(norm, *(value if DIMS[cut] is None else local(value, DIMS[cut], tp) for value in (x, dy)))


@pytest.mark.parametrize("world_size", RANKS)
def test_every_cut_equals_plain_torch_and_the_oracle(world_size):
    block = oracle("rmsnorm")
    names = {"dgamma": "weight"}
    theirs = {names.get(name, name): tensor(value) for name, value in block["expected"].items()}

    def fn(rank, world_size):
        found = {}
        for coalesce in (False, True):
            tp = TensorParallel(coalesce=coalesce)
            cases = {"oracle": (*(tensor(block[name]) for name in ("x", "gamma", "dy")), block["eps"], theirs)}
            for width, shape in ((5, (TOKENS,)), (8, (2, TOKENS)), (3, (TOKENS,))):
                values = draw(1, *shape, width), draw(2, width), draw(3, *shape, width)
                cases[width] = (*values, 1e-6, plain(*values, 1e-6))
            for name, (x, gamma, dy, eps, expected) in cases.items():
                for cut, dim in DIMS.items():
                    whole = expected | {
                        key: value if dim is None else local(value, dim, tp)
                        for key, value in expected.items()
                        if key != "weight"
                    }
                    found[name, cut, coalesce] = distances(ours(cut, x, gamma, dy, eps, tp), whole)
        return found

    assert_a1(launch(fn, world_size))


def test_bytes_of_every_cut_and_of_the_sum_at_the_end():
    width, num_norms = 8, 3

    def fn(rank, world_size):
        found = {}
        for coalesce in (False, True):
            tp = TensorParallel(coalesce=coalesce)
            for cut in DIMS:
                norms = torch.nn.Sequential(
                    *(RMSNorm(width, tp=tp, sharded=cut, dtype=torch.float64) for _ in range(3))
                )
                x = leaf(draw(1, TOKENS, width if cut != "hidden" else width // world_size))
                found[cut, coalesce] = counted(lambda norms=norms, x=x: norms(x).sum().backward())
                found["end", cut, coalesce] = counted(lambda norms=norms: sum_partial_gradients(norms))
        return found

    for found in launch(fn, 4):
        weights = 8 * width * 2 * 3 // 4  # one all-reduce of one weight, in bytes sent
        tokens = 8 * TOKENS * 2 * 3 // 4
        assert found.pop(("tokens", False)) == {"all_reduce": (num_norms, num_norms * weights)}
        assert found.pop(("end", "tokens", True)) == {"all_reduce": (1, num_norms * weights)}
        for coalesce in (False, True):
            assert found.pop(("hidden", coalesce)) == {"all_reduce": (2 * num_norms, 2 * num_norms * tokens)}
        assert all(not messages for messages in found.values())


def test_16_bit_inputs_are_normalised_in_fp32():
    def fn(rank, world_size):
        x = draw(1, 64, 256).bfloat16() * 100
        exact = torch.nn.functional.rms_norm(x.double(), (256,), eps=1e-6)
        y = RMSNorm(256, dtype=torch.bfloat16)(x)
        return y.dtype == torch.bfloat16 and float(((y - exact) / exact).abs().max())

    assert 0 < launch(fn, 1)[0] <= 2**-8  # one rounding of the result


def test_an_unknown_cut_is_refused():
    with pytest.raises(lab.RankError, match="sharded by none, tokens or hidden, got 'rows'"):
        launch(lambda rank, world_size: RMSNorm(4, sharded="rows"), 1)
