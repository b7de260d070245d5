"""A small model over a sharded sequence: positions, labels and valid tokens follow the layout, gradients are summed."""

import pytest
import torch
from cp_runs import assert_close, draw
from runs import launch
from torch.nn import functional as F

from dualpipe_lab.cp.all_gather_attention import all_gather_attention
from dualpipe_lab.cp.layouts import LAYOUTS, make_layout
from dualpipe_lab.cp.ring_attention import ring_attention
from dualpipe_lab.cp.sequence import next_token_labels, positions, shard
from dualpipe_lab.dp.data_parallel import all_reduce_gradients, num_valid_tokens, token_loss
from dualpipe_lab.launch.mesh import Mesh
from dualpipe_lab.sharding import shard_slice
from dualpipe_lab.topology import Topology

VOCABULARY, HEADS, KV_HEADS, SIZE, LENGTH, ROWS = 7, 4, 2, 4, 24, 4
WIDTH = HEADS * SIZE


class Tiny(torch.nn.Module):
    """One block of attention with rotated queries and keys; `attention` is whatever sees the whole sequence."""

    def __init__(self):
        super().__init__()
        shapes = {"table": (VOCABULARY, WIDTH), "q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH // 2), "v": (WIDTH, WIDTH // 2)}
        for seed, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, torch.nn.Parameter(draw(*shape, seed=seed) / 2))

    def forward(self, tokens, where, attention):
        x = self.table[tokens]
        q, k, v = ((x @ weight).unflatten(-1, (-1, SIZE)).transpose(1, 2) for weight in (self.q, self.k, self.v))
        out = attention(rotated(q, where), rotated(k, where), v)
        return (x + out.transpose(1, 2).flatten(2)) @ self.table.t()


def rotated(x, where):
    """Rotary embedding by the positions of the whole sequence."""
    angles = where[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def whole_attention(q, k, v):
    """Torch's, on one process."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def batch():
    """Tokens and labels of which the loss masks out a run: some ranks have many more valid tokens than others."""
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = next_token_labels(tokens)
    labels[:, 3:11] = -100
    labels[1, :20] = -100
    return tokens, labels


def one_process():
    """The loss and the gradients of the whole batch."""
    model, (tokens, labels) = Tiny(), batch()
    logits = model(tokens, torch.arange(LENGTH).double(), whole_attention)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (1, 3), (1, 4), (2, 2)])
def test_gradients_summed_over_cp_and_dp_equal_one_process(dp, cp):
    topology = Topology([("dp", dp), ("cp", cp)])
    tokens, labels = batch()

    def fn(rank, world_size):
        mesh, found = Mesh(topology), []
        rows, group = shard_slice(ROWS, dp, mesh.rank("dp")), mesh.group("cp")
        for name in LAYOUTS:
            for form in (ring_attention, all_gather_attention):
                layout, model = make_layout(name, LENGTH, cp), Tiny()
                mine = [shard(tensor[rows], layout, mesh.rank("cp")) for tensor in (tokens, labels)]
                where = positions(layout, mesh.rank("cp")).double()
                attend = lambda q, k, v, form=form, layout=layout: form(q, k, v, layout, group=group)  # noqa: E731
                loss = token_loss(model(mine[0], where, attend), mine[1], num_valid_tokens(mine[1]))
                loss.backward()
                all_reduce_gradients(model.parameters())  # over cp with dp: they sum what different tokens gave
                gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
                found.append((loss.detach(), gradients, (name, form.__name__)))
        return found

    loss, expected = one_process()
    for results in zip(*launch(fn, dp * cp), strict=True):
        losses, gradients, cases = zip(*results, strict=True)
        assert_close(sum(losses), loss, case=cases[0])
        for found in gradients:
            for name, grad in expected.items():
                assert_close(found[name], grad, case=(cases[0], name))


def test_a_length_that_zigzag_cannot_deal_out_is_padded_and_masked():
    """Nothing sees what stands behind it, and what has no label has no gradient."""
    tokens, labels = (tensor[:, : LENGTH - 3] for tensor in batch())
    num_tokens = int((labels != -100).sum())
    padded = [F.pad(tensor, (0, 3), value=value) for tensor, value in ((tokens, 0), (labels, -100))]
    layout = make_layout("zigzag", LENGTH, 4)

    def gradients(parts, where, attention):
        model = Tiny()
        token_loss(model(parts[0], where.double(), attention), parts[1], num_tokens).backward()
        return model

    def fn(rank, world_size):
        parts = [shard(tensor, layout, rank) for tensor in padded]
        model = gradients(parts, positions(layout, rank), lambda q, k, v: ring_attention(q, k, v, layout))
        all_reduce_gradients(model.parameters())
        return [parameter.grad for parameter in model.parameters()]

    alone = gradients((tokens, labels), torch.arange(LENGTH - 3), whole_attention)
    for found in launch(fn, 4):
        for mine, parameter in zip(found, alone.parameters(), strict=True):
            assert_close(mine, parameter.grad)
