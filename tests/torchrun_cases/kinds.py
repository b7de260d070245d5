"""What ranks do in the tests of the watchdog: a function for each way in which a launch fails, and some that do not."""

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import nullcontext, suppress

import torch

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.world.folder import private_folder
from torchrun_cases.collectives import every_collective


def fine(rank, world_size):
    x = torch.full((2,), float(rank))
    comm.all_reduce(x)
    return x[0].item()


def raises(rank, world_size):
    if rank == 1:
        time.sleep(0.5)  # on a busy machine the others need this to get there
        raise ValueError("bad shape")
    comm.all_reduce(torch.ones(2))


def leaves(rank, world_size):
    if rank == 1:
        sys.exit(4)
    comm.all_reduce(torch.ones(2))


def exits(rank, world_size):
    if rank == 1:
        os._exit(3)
    comm.barrier()


def is_killed(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(torch.ones(2))


def is_terminated(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    comm.all_reduce(torch.ones(2))


def is_killed_with_a_folder(rank, world_size):
    is_killed(rank, world_size)


def segfaults(rank, world_size):
    if rank == 1:
        ctypes.string_at(0)
    comm.barrier()


def sends_too_much(rank, world_size):
    if rank == 1:
        comm.send(torch.ones(4), 0)
    elif rank == 0:
        comm.recv(torch.ones(3), 1)


def never_joins(rank, world_size):
    if rank != world_size - 1:
        comm.all_reduce(torch.ones(2))


def waits_with_a_folder(rank, world_size):
    """Ranks that cannot leave the block in `main`, because they wait inside of GLOO, each for another."""
    waits_in_a_ring(rank, world_size)


def mixes_order(rank, world_size):
    if rank == 0:
        comm.all_reduce(torch.ones(4))
    else:
        comm.all_to_all_single(torch.ones(world_size), torch.ones(world_size))


def waits_in_a_ring(rank, world_size):
    x = torch.ones(4)
    comm.recv(x, (rank - 1) % world_size, tag=9)
    comm.send(x, (rank + 1) % world_size, tag=9)


def mistakes_a_tag(rank, world_size):
    if rank == 0:
        comm.send(torch.ones(3), 1, tag=2)
    elif rank == 1:
        comm.recv(torch.ones(3), 0, tag=3)


def never_ends(rank, world_size):
    if rank == 1:
        while True:
            pass
    comm.barrier()


def is_stopped(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    comm.barrier()


def holds_the_interpreter(rank, world_size):
    if rank == 1:
        ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the lock
    comm.barrier()


def computes_on(rank, world_size):
    if rank == 0:
        time.sleep(3.5)
    comm.all_reduce(torch.ones(2))
    return "fine"


def holds_it_for_a_while(rank, world_size):
    if rank == world_size - 1:
        ctypes.PyDLL(None).sleep(4)
    comm.all_reduce(torch.ones(2))
    return "fine"


def moves_slowly(rank, world_size):
    """A message that takes seconds on a slow link, between ranks that compute nothing meanwhile."""
    x = torch.ones(1_000_000)
    for _ in range(2):
        if rank == 0:
            comm.send(x, world_size - 1)
        elif rank == world_size - 1:
            comm.recv(x, 0)
        comm.barrier()
    return "fine"


def trains(rank, world_size):
    """Steps for a minute, until something happens."""
    x = torch.ones(1_000)
    for step in range(600):
        comm.all_reduce(x)
        if rank == 0 and step == 10:
            say("STEPPING")
        time.sleep(0.1)


def forks(rank, world_size):
    """A child that ends by SIGTERM, as `Process.terminate` does, is no reason to end its rank."""
    child = os.fork()
    if not child:
        time.sleep(60)
    os.kill(child, signal.SIGTERM)
    status = os.waitpid(child, 0)[1]
    time.sleep(1.5)
    comm.barrier()
    return "fine" if os.waitstatus_to_exitcode(status) == -signal.SIGTERM else status


def comes_back(rank, world_size):
    """The last rank is killed in the first start, and all of them are there in the second."""
    x = torch.ones(2)
    comm.all_reduce(x)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(x)
    return x[0].item()


def wired_collectives(rank, world_size):
    """Every collective, of tensors beside which GLOO's headers are small; see `main` for what is said of them."""
    every_collective(rank, world_size, 4 * 2**18)


def parts(rank, world_size):
    """The parts that a test has asked for."""
    from torchrun_cases import crossing

    crossing.measure(rank, world_size)


wired_parts = parts


def wired_stages_across_nodes(rank, world_size):
    trains_a_step(("pp", "dp", "ep", "cp", "tp"))


def wired_experts_across_nodes(rank, world_size):
    trains_a_step(("ep", "dp", "pp", "cp", "tp"))


def trains_a_step(order):
    """A step of a model with experts on DualPipe, pp 2 x ep 2."""
    from dualpipe_lab import models, train

    config = models.V3MoEConfig(
        hidden_size=64, num_layers=4, num_heads=2, num_kv_heads=2, ffn_size=128, expert_ffn_size=64, num_experts=4,
        num_groups=2,
    )  # fmt: skip
    options = train.Options(sequence_length=64, global_batch=16)
    plan = lab.Plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipe", zero=1, order=order)
    trainer = train.Trainer(config, plan, options)
    trainer.step(trainer.batch(options.sampler(bytes(range(256)) * 64)))


def say(text):
    sys.stderr.write(f"{text} {time.time():.3f}\n")
    sys.stderr.flush()


def be_a_script():
    """Be as a script that torchrun starts: without the forking agent's signals and sockets, nor its end."""
    with open(os.devnull) as nothing:
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                    os.dup2(nothing.fileno(), int(number))  # else the store's port would outlive the agent
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)


def main(kind, timeout):
    """One rank of a test; it says when its function began, and when and how its launch ended."""
    be_a_script()
    rank = os.environ["RANK"]

    def begin(number, world_size):
        say(f"BEGAN {rank}")
        return globals()[kind](number, world_size)

    try:
        with private_folder() if kind.endswith("with_a_folder") else nullcontext():
            results = lab.launch(begin, None, timeout=timeout, wire=kind.startswith("wired"))
        values = list(results)
    except (lab.RankError, lab.RankTimeout) as error:
        say(f"RAISED {rank} {type(error).__name__}: {error}\nEND {rank}")
        sys.exit(1)
    if kind.startswith("wired"):
        ledger, names = results.ledger, sorted({name for own in results.ledger.ranks for name in own.entries})
        found = {n: (ledger.count(n), ledger.between_nodes(2, n), ledger.wire_between_hosts(n)) for n in names}
        sys.stderr.write(f"COUNTED {rank} {json.dumps(found)}\n")
    say(f"VALUES {rank} {values}\nEND {rank}")
