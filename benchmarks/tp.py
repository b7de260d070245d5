"""A training step of our Llama beside torch's tensor parallelism, on 2 GLOO ranks.

The same model, the same data, one thread per rank: forward, loss and backward, with SGD's update of the weights.  In
each round both contenders take some steps, one after the other and in turns first, so that both meet the same load;
medians over the rounds, and the median of the rounds' ratios.  Both use torch's attention, so that what is compared
is the sharding.  CPU time is that of rank 0's process with GLOO's threads; on a busy machine it says more than the
time on the wall.

    python benchmarks/tp.py [--rounds 15] [--steps 4] [--hidden 256] [--layers 4] [--tokens 128] [--vocabulary 4096]
"""

import argparse
import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from _paired import Found, cells, paired, paired_table
from rich.console import Console
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

import dualpipe_lab as lab
from dualpipe_lab.models import Llama, LlamaConfig, PlainLlama, parallelize
from dualpipe_lab.tp import full_state_dict

RANKS, BATCH = 2, 2
TITLES = {
    "plain": "Llama / Colwise, Rowwise, loss_parallel",
    "sequence": "the same with sequence_parallel / SequenceParallel",
    "sequence, kept": "the same with regather=False / SequenceParallel",
    "attention": "Llama with its own attention / as above",
}
Step = Callable[[Tensor], None]


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as torch has it."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def contenders(kind: str, config: LlamaConfig) -> dict[str, Step]:
    """A step of ours and a step of torch's, from the same weights."""
    mesh, is_sharded = lab.Mesh(lab.Topology([("tp", RANKS)])), kind.startswith("sequence")
    attend = {} if kind == "attention" else {"attend": torch_attention}
    ours = Llama(config, mesh, is_sharded, regather=kind != "sequence, kept", **attend)
    theirs = PlainLlama(config)
    theirs.load_state_dict(full_state_dict(ours, ours.tp.group))
    theirs = parallelize(theirs, mesh.device_mesh(), is_sharded)

    def step_of(model: torch.nn.Module, context: Callable) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(ids: Tensor) -> None:
            optimizer.zero_grad()
            with context():
                model.loss(ids, ids.roll(-1, 1)).backward()
            optimizer.step()

        return step

    return {"ours": step_of(ours, nullcontext), "theirs": step_of(theirs, loss_parallel)}


def compare(rank: int, world_size: int, kind: str, rounds: int, steps: int, tokens: int, config: LlamaConfig) -> Found:
    """What both contenders took in every round."""
    ids = torch.randint(0, config.vocabulary_size, (BATCH, tokens), generator=torch.Generator().manual_seed(0))
    both = {name: partial(step, ids) for name, step in contenders(kind, config).items()}
    gc.freeze()
    return paired(both, rounds, steps)


def main() -> None:
    """Run all comparisons and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rounds", 15), ("steps", 4), ("hidden", 256), ("layers", 4), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=4096)
    chosen = parser.parse_args()
    width = chosen.hidden
    config = LlamaConfig(chosen.vocabulary, width, 4 * width, chosen.layers, num_heads=8, num_kv_heads=4)
    title = (
        f"{RANKS} GLOO ranks, {config.num_parameters() / 1e6:.1f} million fp32 parameters, {BATCH} x {chosen.tokens}"
    )
    table = paired_table(f"{title} tokens, {chosen.rounds} rounds")
    for kind, name in TITLES.items():
        sizes = chosen.rounds, chosen.steps, chosen.tokens, config
        table.add_row(name, *cells(lab.launch(compare, RANKS, kind, *sizes, timeout=600, output="collect")[0]))
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
