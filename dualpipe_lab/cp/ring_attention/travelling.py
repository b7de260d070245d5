"""The ring form: blocks of keys and values travel, and in the backward their gradients travel behind them.

Chapter: book/cp/ring-attention.  In: this rank's part.  Out: blocks as they come; dQ, and dK with dV come home.
A step waits for the next block after its work and not before it, so that a message has the whole step to arrive; what
no work can hide is the last hop of the gradients.
Source: Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889), section 3.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dualpipe_lab.cp.ring import Turn, room
from dualpipe_lab.cp.ring_attention.plan import Plan, add_block, block_gradients
from dualpipe_lab.cp.softmax import accumulate_in
from dualpipe_lab.cp.step_log import StepLog
from dualpipe_lab.viz.steplog import Cell

KV, DKV = 0, 1  # tags: both kinds of messages are under way between the same ranks


def blocks(k: Tensor, v: Tensor, plan: Plan, log: StepLog | None = None) -> Iterator[tuple[int, Tensor]]:
    """Each block of keys and values once, its owner first; the next one comes while the caller works.

    Keys and values are one message: a hop then costs one latency.  A block is the caller's until it asks for the
    next one: two buffers go in turns.
    """
    ring, kv = plan.ring, torch.stack((k, v))
    spare = kv.new_empty(0)
    if log is not None:
        log.start = [_cell("KV", ring.position)]
    for step in range(ring.size):
        source, following = ring.behind(step), ring.behind(step + 1)
        turn = None
        if step < ring.size - 1:
            turn = ring.turn(kv, room(plan.block_shape(k, following), spare), KV, f"KV {source}")
        yield source, kv
        if turn is not None:
            spare, kv = kv, turn.wait()
        if log is not None:
            sent, held = ([_cell("KV", number)] if turn else [] for number in (source, following))
            log.add(f"step {step + 1}", ring.behind(-1), sent, [*held, *_pairs(plan, step)])


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Return dQ `dq_BHSD` and this rank's own `dkv_2BKSD`, after the whole ring has added to it."""
    ring, wide = plan.ring, accumulate_in(q.dtype)
    dq = torch.empty_like(q, dtype=wide)
    dkv = dq.new_empty(plan.block_shape(k, ring.position))
    spare = dkv.new_empty(0)
    coming: Turn | None = None
    log = None if plan.log is None else plan.log.backward
    if log is not None:
        log.start = [_cell("KV", ring.position)]
    for step, (source, kv) in enumerate(blocks(k, v, plan)):
        view = plan.view(source)
        found = None if view is None else block_gradients(grad, q, kv, out, lse, view, plan)
        if coming is not None:
            spare, dkv = dkv, coming.wait()  # what the ranks before have added, while this one worked
            add_block(dq, dkv, view, found)
        elif found is not None:  # the own block: all queries and all keys
            dq, dkv = found[0].to(wide), torch.stack(found[1:]).to(wide)
        if ring.size > 1:
            arriving = room(plan.block_shape(k, ring.behind(step + 1)), spare)
            coming = ring.turn(dkv, arriving, DKV, f"dKV {source}")
        if log is not None:
            _write(log, plan, step)
    return dq, coming.wait() if coming is not None else dkv


def _write(log: StepLog, plan: Plan, step: int) -> None:
    ring = plan.ring
    kinds = ("KV", "dKV") if step < ring.size - 1 else ("dKV",)
    sent, held = ([_cell(kind, ring.behind(number)) for kind in kinds] for number in (step, step + 1))
    log.add(f"step {step + 1}", ring.behind(-1), sent if ring.size > 1 else [], held)


def _cell(kind: str, owner: int) -> Cell:
    return f"{kind}{owner}", owner


def _pairs(plan: Plan, step: int) -> list[Cell]:
    """How many pairs this rank has computed with each block so far."""
    owners = [plan.ring.behind(number) for number in range(step + 1)]
    views = [plan.view(owner) for owner in owners]
    return [(str(view.num_pairs if view else 0), owner) for view, owner in zip(views, owners, strict=True)]
