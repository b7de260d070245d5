"""Training while experts move: steps beside a run that does not move, bytes counted, loads, refusals."""

import pytest
import torch
from ep_runs import distance
from moe_cases import FFN, HIDDEN
from runs import A1, draw, launch

import dualpipe_lab as lab
from dualpipe_lab.dp.adam import AdamW, Hyperparameters
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.ep.deepseek_moe import DeepSeekMoE, DeepSeekRouter, update_biases
from dualpipe_lab.ep.eplb import ExpertPlacement, balance, rebalance_experts
from dualpipe_lab.ep.moe import ExpertParallel, reduce_gradients
from dualpipe_lab.ep.moving_experts import full_experts, move_experts, rebalance, state_of
from dualpipe_lab.ep.node_dispatch import NodeGroups
from dualpipe_lab.ep.placed_experts import collect_experts, place_experts, sources
from dualpipe_lab.models.v3_moe import V3MoE
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.world.context import rank_context

E, K, TOKENS, STEPS, EVERY = 8, 2, 12, 6, 2
HYPER = Hyperparameters(lr=1e-2, eps=1e-3)
OPTIMIZERS = {
    "ours": lambda model: AdamW(model.parameters(), HYPER),
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3),
}


def make_model(ep=None, num_nodes=1):
    router = DeepSeekRouter(HIDDEN, E, K, 2, 2, dtype=torch.float64)
    nodes = None if num_nodes == 1 else NodeGroups.of(num_nodes, ep)
    return torch.nn.Sequential(DeepSeekMoE(router, HIDDEN, FFN, ep, None, torch.float64, nodes))


def batch(step, rank):
    """Tokens whose common part drifts, so that other experts become busy."""
    return draw(100 * step + rank, TOKENS, HIDDEN) + draw(1 + step // EVERY, HIDDEN)


def sent_bytes():
    """What this rank has sent in all-to-alls so far."""
    return rank_context().ledger.entries["all_to_all_single"].sent


def train(rank, kind, moves, ep=None, num_nodes=1):
    """Losses, raw gradients of all steps, and what was moved."""
    model = make_model(ep, num_nodes)
    layers = place_experts(model, balance([[1.0] * E], 12, num_ranks=model[0].experts.ep.size)) if moves else []
    optimizer, found, moved = OPTIMIZERS[kind](model), [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = (model(batch(step, rank)) - 1).square().sum()
        loss.backward()
        reduce_gradients(model, model[0].experts.ep, 4 * TOKENS)
        found.append(
            (loss.detach(), {"router": model[0].router.weight.grad.clone()} | full_experts(model[0].experts, "grad"))
        )
        optimizer.step()
        loads = update_biases(model, 0.0)
        if moves and step % EVERY == 1:
            held = [len(state_of(optimizer, p)) for p in layers[0].weights]
            table, before = layers[0].table, sent_bytes()
            (report,) = rebalance(layers, loads, optimizer, max_moves=moves, num_nodes=num_nodes)
            moved.append((held, table, layers[0].table, report, sent_bytes() - before))
    collect_experts(model)
    return found, [p.detach() for p in model.parameters()], moved


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_those_of_a_run_that_does_not_move(kind):
    """Losses, every raw gradient and the weights at the end; what moved is what the tables say."""

    def fn(rank, world_size):
        return train(rank, kind, 0), train(rank, kind, 4)

    results = launch(fn, 4)
    for rank, ((still, ends, _), (found, weights, moved)) in enumerate(results):
        for (loss, grads), (expected, plain) in zip(found, still, strict=True):
            assert distance(loss, expected) <= A1
            assert grads.keys() == plain.keys()
            for name, grad in grads.items():
                assert distance(grad, plain[name]) <= A1, name
        for weight, end in zip(weights, ends, strict=True):
            assert distance(weight, end) <= A1
        for held, old, new, report, sent in moved:
            assert held == [2, 2, 2]
            assert report.num_slots == sum(a != b for a, b in zip(old, new, strict=True)) <= 4
            assert report.after.max() <= report.before.max()
            leaving = sum(a // 3 == rank != b // 3 for b, a in enumerate(sources(old, new, 4)))
            assert report.sent_bytes == leaving * 3 * HIDDEN * FFN * 3 * 8  # a weight and two moments
            assert sent == report.sent_bytes
    assert all(report.num_slots > 0 for *_, report, _ in results[0][1][2])
    assert sum(report.sent_bytes for result in results for *_, report, _ in result[1][2]) > 0


def test_without_the_moments_the_steps_differ():
    """The check above can fail: weights that move alone meet the moments of another expert."""

    def fn(rank, world_size):
        ends = []
        for forgets in (False, True):
            model = make_model()
            layers = place_experts(model, balance([[1.0] * E], 12, num_ranks=2))
            optimizer = AdamW(model.parameters(), HYPER)
            for step in range(3):
                optimizer.zero_grad()
                (model(batch(step, rank)) - 1).square().sum().backward()
                reduce_gradients(model, model[0].experts.ep, 2 * TOKENS)
                optimizer.step()
                if step == 1:
                    plan = balance([list(range(1, E + 1))], 12, num_ranks=2)
                    move_experts(layers[0], plan, None if forgets else optimizer)
            ends.append(full_experts(layers[0])["gate"])
        return distance(*ends)

    assert min(launch(fn, 2)) > 1e-6


def test_copies_of_the_layer_and_nodes_move_alike():
    """dp 2 x ep 2: both copies make the same moves; by node: experts stay on their node."""
    topology = lab.Topology([("dp", 2), ("ep", 2)])

    def fn(rank, world_size):
        ep = ExpertParallel.of(lab.Mesh(topology))
        copies = train(rank, "ours", 0, ep), train(rank, "ours", 4, ep)
        nodes = train(rank, "ours", 0), train(rank, "ours", 4, None, 2)
        return copies, nodes

    for copies, nodes in launch(fn, 4):
        for (still, ends, _), (found, weights, moved) in (copies, nodes):
            for (_, grads), (_, plain) in zip(found, still, strict=True):
                assert all(distance(grad, plain[name]) <= A1 for name, grad in grads.items())
            assert all(distance(a, b) <= A1 for a, b in zip(weights, ends, strict=True))
            assert any(report.num_slots > 0 for *_, report, _ in moved)


def test_a_v3_model_trains_with_replicas_and_norms_count_them_once():
    """Two MoE layers: loss, norm and full state of the model without a placement."""
    config = V3MoEConfig(hidden_size=8, num_layers=3, vocabulary_size=17, num_heads=2, num_kv_heads=2, ffn_size=12,
                         expert_ffn_size=4)  # fmt: skip
    loads = draw(0, 2, config.num_experts).abs()
    ids = torch.arange(24).view(4, 1, 6) % 17

    def fn(rank, world_size):
        found = []
        for moves in (False, True):
            model = V3MoE(config, lab.Topology([("ep", 4)]), dtype=torch.float64)
            if moves:
                layers = place_experts(model, ExpertPlacement(*rebalance_experts(loads, 12, 4, 2, 4)))
            optimizer, norms = AdamW(model.parameters(), HYPER), []
            for step in range(3):
                optimizer.zero_grad()
                loss = model.loss(ids[rank], (ids[rank] + step) % 17, 24, 4)
                loss.backward()
                model.reduce_gradients()
                norms.append((float(loss), model.gradient_norm()))
                optimizer.step()
                each = model.update_biases(0.001)
                if moves:
                    rebalance(layers, each, optimizer, max_moves=3)
            collect_experts(model)
            found.append((norms, model.full_state_dict()))
        return found

    for (still, before), (moved, after) in launch(fn, 4):
        assert torch.tensor(moved).sub(torch.tensor(still)).abs().max() <= A1 * 10
        for name, value in after.items():
            assert distance(value, before[name]) <= A1, name


def test_what_cannot_move_says_so():
    def fn(rank, world_size):
        model = make_model()
        late = AdamW(model.parameters(), HYPER)
        layers = place_experts(model, balance([[1.0] * E], 12, num_ranks=2))
        other = balance([[1.0] * E], 10, num_ranks=2)
        load, texts = torch.arange(1.0, E + 1), []
        for call in (
            lambda: rebalance(layers, [load + rank], None, 2),
            lambda: rebalance(layers, [], None, 2),
            lambda: rebalance(layers, [load], late, 2),
            lambda: rebalance(layers, [load], Zero1(torch.nn.Linear(2, 2)), 2),
            lambda: move_experts(layers[0], other),
        ):
            with pytest.raises(ValueError, match=r"got|differ|hold") as caught:
                call()
            texts.append(str(caught.value))
        return texts

    for texts in launch(fn, 2):
        for text, part in zip(
            texts,
            (
                "these loads differ between ranks; sum them first",
                "got 1 layers and 0 loads",
                "make the optimizer after place_experts",
                "make the optimizer over the Mesh, after place_experts",
                "got 10 for 12; collect and place anew",
            ),
            strict=True,
        ):
            assert part in text
