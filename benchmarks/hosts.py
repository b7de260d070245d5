"""Steps per second on two hosts of two ranks, beside one host of four, beside the same step in plain torch.

Two trainings.  Linear layers, with gradients summed over four data ranks: ours with `dp.Ddp`, plain torch with autograd
and one all-reduce of the flat gradient.  A small Llama under pp 2 x dp 2, 1F1B: ours with `train.Trainer`, plain torch
with `torch.distributed.pipelining` and an all-reduce.  Hosts are network namespaces: Linux, root, iproute2.
The four contenders of a training are worlds of four ranks that live at the same time and take turns: in each round
every one takes some steps while the others wait for a message.  Bytes between hosts are those that leave the interfaces
of both, with all headers and with the messages of store and watchdog.

    python benchmarks/hosts.py [--rounds 9] [--steps 10] [--only ddp llama]
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _paired import in_turns, spread
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dualpipe_lab as lab
from dualpipe_lab import data, dp, models, tp, train
from dualpipe_lab.world.emulate import hosts

RANKS, WIDTH, DEPTH, ROWS = 4, 512, 4, 64
CONFIG = models.LlamaConfig(256, 128, 512, 4, num_heads=8, num_kv_heads=4)
MICROBATCHES, TOKENS, BATCH = 4, 64, 16  # sequences of a step
PLAN = lab.Plan(pp=2, dp=2, num_microbatches=MICROBATCHES)
OPTIONS: dict[str, Any] = {"sequence_length": TOKENS, "global_batch": BATCH, "max_norm": None}
OURS, TWO_HOSTS = "ours", "2 x 2"
CONTENDERS = tuple(f"{who}, {where}" for who in (OURS, "plain torch") for where in (TWO_HOSTS, "1 x 4"))
PORT, PATIENCE = 29_650, 600.0
Step = Callable[[], object]


def network() -> nn.Sequential:
    """The layers of the first training."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def our_ddp(rank: int) -> Step:
    """A step with gradients summed in buckets by `dp.Ddp`, and its AdamW."""
    model, x = network(), torch.randn(ROWS, WIDTH)
    optimizer = dp.Ddp(model)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def summed(model: nn.Module, group: Any = None) -> None:
    """Sum the gradients of a module by one all-reduce."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def plain_ddp(rank: int) -> Step:
    """The same in plain torch."""
    model, x = network(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        summed(model)
        optimizer.step()

    return step


def our_llama(rank: int) -> Step:
    """A step of a trainer."""
    trainer = train.Trainer(CONFIG, PLAN, train.Options(**OPTIONS))
    batch = trainer.batch(trainer.options.sampler(data.frozen_corpus()), 0)
    return lambda: trainer.step(batch)


class Half(nn.Module):
    """The embedding and the first layers of a plain Llama, or the last layers, the norm and the head."""

    def __init__(self, model: models.PlainLlama, number: int) -> None:
        super().__init__()
        layers, half = list(model.layers), len(model.layers) // 2
        self.embedding = None if number else model.embedding
        self.layers = nn.ModuleList(layers[half:] if number else layers[:half])
        self.norm, self.head = (model.norm, model.head) if number else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Return x_BSD of ids_BS, or logits_BSV of x_BSD."""
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x, torch.arange(x.shape[1]))
        return x if self.head is None else self.head(self.norm(x))


def plain_llama(rank: int) -> Step:
    """The same in plain torch: its pipeline along the ranks of a column, an all-reduce along a row."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage_number, data_rank = divmod(rank, 2)  # as `PLAN` places its axes
    columns = [dist.new_group([column, column + 2]) for column in range(2)]
    rows = [dist.new_group([2 * row, 2 * row + 1]) for row in range(2)]
    model = models.PlainLlama(CONFIG)
    tp.initialize_parameters(model, 0)
    module = Half(model, stage_number)
    stage = PipelineStage(module, stage_number, 2, torch.device("cpu"), group=columns[data_rank])

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(module.parameters())
    batch = train.Options(**OPTIONS).sampler(data.frozen_corpus()).batch(0, MICROBATCHES, data_rank, 2)
    ids, targets = torch.cat(batch.inputs), torch.cat(batch.targets)

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(target=targets) if stage_number else schedule.step(ids)
        summed(module, rows[stage_number])
        optimizer.step()

    return step


TRAININGS = {"ddp": (our_ddp, plain_ddp), "llama": (our_llama, plain_llama)}
TITLES = {
    "ddp": f"{DEPTH} linear layers of {WIDTH}, dp {RANKS}, AdamW",
    "llama": f"Llama of {CONFIG.num_parameters() / 1e6:.1f} million parameters, pp 2 (1F1B, m {MICROBATCHES}) x dp 2",
}


def serve(rank: int, world_size: int, build: Callable[[int], Step], folder: str) -> None:
    """In a rank: take as many steps as rank 0 reads in a file, again and again until it reads 0."""
    torch.set_num_threads(1)
    step, asked, turn = build(rank), torch.zeros(1, dtype=torch.int64), 0
    while True:
        path, deadline = Path(folder) / f"steps-{turn}", time.monotonic() + PATIENCE
        while rank == 0 and not path.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        if rank == 0:  # a benchmark that was killed asks nothing
            asked.fill_(int(path.read_text()) if path.exists() else 0)
        dist.broadcast(asked, 0)  # past `comm`, which would keep a record of it
        if not asked:
            return
        began = time.perf_counter()
        for _ in range(int(asked)):
            step()
        dist.barrier()
        if rank == 0:
            done = path.with_name(f"part-{turn}")
            done.write_text(str((time.perf_counter() - began) / int(asked)))
            done.rename(path.with_name(f"done-{turn}"))
        turn += 1


def be_rank(training: str, who: str, folder: str) -> None:
    """What one process does that torchrun, or `launch`, has started."""
    ours, plain = TRAININGS[training]
    if who == OURS:
        lab.launch(serve, None if "RANK" in os.environ else RANKS, ours, folder, timeout=86_400)
        return
    dist.init_process_group("gloo")
    serve(dist.get_rank(), dist.get_world_size(), plain, folder)
    dist.destroy_process_group()


@contextlib.contextmanager
def started(training: str, made: list[hosts.Host]) -> Iterator[dict[str, Path]]:
    """The folders of the contenders' files, while their ranks live."""
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: Path(folder) / str(number) for number, name in enumerate(CONTENDERS)}
        for number, (name, own) in enumerate(folders.items()):
            own.mkdir()
            who, where = name.split(", ")
            script = [__file__, "--serve", training, who, str(own)]
            torchrun = [sys.executable, "-m", "torch.distributed.run"]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": hosts.INTERFACE}
            if where == TWO_HOSTS:
                meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{made[0].address}:{PORT + number}"]
                for host in made:
                    is_first = f"is_host={int(host is made[0])}"  # it does not know its own address
                    options = ["--nnodes", "2", "--nproc-per-node", "2", "--local-addr", host.address, *meet]
                    options += ["--rdzv-conf", is_first]
                    processes.append(host.start([*torchrun, *options, *script], env=environment))
            else:
                environment.pop("GLOO_SOCKET_IFNAME")
                alone = [sys.executable] if who == OURS else [*torchrun, "--standalone", "--nproc-per-node", str(RANKS)]
                processes.append(subprocess.Popen([*alone, *script], env=environment))
        try:
            yield folders
        except BaseException:
            for process in processes:
                process.terminate()
            raise
        finally:
            for process in processes:
                process.wait(PATIENCE)


def left(host: hosts.Host) -> int:
    """Bytes that have left a host's interface."""
    return int(host.run("cat", f"/sys/class/net/{hosts.INTERFACE}/statistics/tx_bytes"))


def measure(training: str, rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds per step, and bytes per step that left the hosts, of each contender in each round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    with hosts.network(2) as made, started(training, made) as folders:
        for turn in range(rounds + 1):
            for name in in_turns(CONTENDERS, turn):
                before = sum(map(left, made))
                seconds = ask(folders[name], turn, steps)
                if turn:  # the first round warms up
                    found[name].append((seconds, (sum(map(left, made)) - before) / steps))
        for own in folders.values():
            (own / f"steps-{rounds + 1}").write_text("0")
    return found


def ask(folder: Path, turn: int, steps: int) -> float:
    """Let one contender take some steps; return seconds per step."""
    (folder / "asking").write_text(str(steps))
    (folder / "asking").rename(folder / f"steps-{turn}")
    deadline = time.monotonic() + PATIENCE
    while not (folder / f"done-{turn}").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer in {folder} after {PATIENCE:.0f} s")
        time.sleep(0.005)
    return float((folder / f"done-{turn}").read_text())


def table(training: str, found: dict[str, list[tuple[float, float]]]) -> Table:
    """The medians, and each contender's time over that of the plain one on one host, round by round."""
    rounds = len(found[CONTENDERS[0]])
    shown = Table(title=f"{TITLES[training]}; {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for column in ("", "ms per step", "steps per second", "time / plain torch, 1 x 4", "bytes between hosts per step"):
        shown.add_column(column, justify="right")
    base = [seconds for seconds, _ in found[CONTENDERS[-1]]]
    for name, rows in found.items():
        seconds = [row[0] for row in rows]
        ratios = [one / other for one, other in zip(seconds, base, strict=True)]
        sent = statistics.median(row[1] for row in rows)
        middle = statistics.median(seconds)
        crossed = f"{sent:,.0f}" if name.endswith(TWO_HOSTS) else "-"
        shown.add_row(name, f"{1e3 * middle:.1f}", f"{1 / middle:.1f}", spread(ratios), crossed)
    return shown


def main() -> None:
    """Measure both trainings and print their tables."""
    if "--serve" in sys.argv:
        be_rank(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 9), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    chosen = parser.parse_args()
    if reason := hosts.obstacle():
        sys.exit(reason)
    for training in chosen.only:
        Console(width=140).print(table(training, measure(training, chosen.rounds, chosen.steps)))


if __name__ == "__main__":
    main()
