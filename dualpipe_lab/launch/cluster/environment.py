"""`Environment`: who started this process as one of several ranks, and on which node it is.

Chapter: book/appendix/gpus.  In: environment variables.  Out: one checked object; None for a process by itself.
  torchrun     RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE
  Slurm        of a task of `srun`: SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, and the sizes and hosts of its step
  Kubernetes   pod of an indexed Job: JOB_COMPLETION_INDEX; WORLD_SIZE, MASTER_ADDR, MASTER_PORT of its Job's file
The first row that is there counts: `torchrun` may run inside of the other two.
Elsewhere: `torch.distributed`'s `env://`; Lightning `ClusterEnvironment`.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ONE_MACHINE = "DUALPIPE_LAB_NODES_ON_ONE_MACHINE"  # set to 1: loopback reaches every node
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000  # of Slurm's jobs; below those that Linux hands out by itself


@dataclass(frozen=True)
class Environment:
    """This process among the ranks that a starter has started.

    Attributes:
        rank, world_size: number of this rank, number of ranks.
        local_rank: number of this rank on its node, and of its GPU.
        ranks_per_node: ranks on this node; None if the starter does not say.
        node, num_nodes: number of this node, number of nodes; None if the starter does not say.
        master_addr, master_port: where the ranks meet; on the node of rank 0.
        restart: how often the starter has started these ranks again.
        starter: `torchrun`, `Slurm`, `Kubernetes`, or `the environment` where another one has set torchrun's variables.
        agent_hosts_store: the starter's own process listens at the master's port, and rank 0 does not.
        nodes_on_one_machine: all nodes are processes of this machine, so that loopback reaches them.

    Raises:
        ValueError: numbers that contradict each other.
    """

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int | None
    node: int | None
    num_nodes: int | None
    master_addr: str
    master_port: int
    restart: int = 0
    starter: str = "the environment"
    agent_hosts_store: bool = False
    nodes_on_one_machine: bool = False

    def __post_init__(self) -> None:
        for name, number, size in (
            ("ranks", self.rank, self.world_size),
            ("ranks of a node", self.local_rank, self.ranks_per_node),
            ("nodes", self.node, self.num_nodes),
        ):
            if number is not None and size is not None and number >= size:
                raise ValueError(f"{size} {name} are numbered 0 to {size - 1}, got number {number} from {self.starter}")

    @property
    def is_one_machine(self) -> bool:
        """Whether loopback reaches every rank, as far as this process can tell."""
        return self.num_nodes == 1 or self.nodes_on_one_machine

    @property
    def has_equal_nodes(self) -> bool:
        """Whether every node has equally many ranks, with consecutive numbers, as far as this process can tell."""
        if self.ranks_per_node is None or self.node is None or self.num_nodes is None:
            return False
        is_consecutive = self.rank == self.node * self.ranks_per_node + self.local_rank
        return is_consecutive and self.ranks_per_node * self.num_nodes == self.world_size

    def __str__(self) -> str:
        node = "" if self.node is None else f" on node {self.node} of {self.num_nodes}"
        return f"rank {self.rank} of {self.world_size}{node}, started by {self.starter}"


def cluster(variables: Mapping[str, str] | None = None) -> Environment | None:
    """Return how `torchrun`, Slurm or Kubernetes has started this process; None if none of them has.

    Args:
        variables: of the process (default: its own environment).

    Raises:
        ValueError: some of the variables of a starter are missing, or are no numbers.

    >>> print(cluster({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.10", "MASTER_PORT": "29500"}))
    rank 3 of 4, started by the environment
    """
    found = _Variables(os.environ if variables is None else variables)
    if "RANK" in found.values:
        return _of_torchrun(found)
    if "SLURM_PROCID" in found.values and found.first("SLURM_STEP_ID", "SLURM_STEPID") is not None:
        return _of_slurm(found)  # without a step it is the batch script itself, not a task of srun
    if "WORLD_SIZE" in found.values:
        return _of_kubernetes(found)
    return None


class _Variables:
    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values

    def first(self, *names: str) -> str | None:
        return next((self.values[name] for name in names if self.values.get(name)), None)

    def number(self, *names: str, least: int = 0) -> int | None:
        """The number in the first of these variables that is set; None without one."""
        name = next((name for name in names if self.values.get(name)), None)
        if name is None:
            return None
        text = self.values[name]
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
            raise ValueError(f"{name} is a whole number from {least}, got {text!r}; set it so, or unset it")
        return int(text)

    def needed(self, *names: str, least: int = 0) -> int:
        found = self.number(*names, least=least)
        if found is None:
            raise ValueError(f"a rank needs {' or '.join(names)}, and it is not set; start the ranks by one launcher")
        return found

    def port(self) -> int:
        port = self.needed("MASTER_PORT", least=1)
        if port > 65_535:
            raise ValueError(f"MASTER_PORT is at most 65535, got {port}; choose one that is free on the node of rank 0")
        return port

    def refuse_missing(self, names: tuple[str, ...]) -> None:
        missing = [name for name in names if not self.values.get(name)]
        if missing:
            there = [name for name in names if self.values.get(name)]
            raise ValueError(
                f"a rank among others needs {', '.join(names)}, got {', '.join(there)} without {', '.join(missing)}; "
                f"set {', '.join(missing)}, or unset {', '.join(there)} to start ranks here"
            )


def _of_torchrun(found: _Variables) -> Environment:
    found.refuse_missing(_NEEDED)
    is_torchrun = found.first("TORCHELASTIC_RUN_ID") is not None
    return Environment(
        rank=found.needed("RANK"),
        world_size=found.needed("WORLD_SIZE", least=1),
        local_rank=found.number("LOCAL_RANK") or 0,
        ranks_per_node=found.number("LOCAL_WORLD_SIZE", least=1),
        node=found.number("GROUP_RANK"),
        num_nodes=found.number("GROUP_WORLD_SIZE", least=1),
        master_addr=found.values["MASTER_ADDR"],
        master_port=found.port(),
        restart=found.number("TORCHELASTIC_RESTART_COUNT") or 0,
        starter="torchrun" if is_torchrun else "the environment",
        agent_hosts_store=found.first("TORCHELASTIC_USE_AGENT_STORE") == "True",
        nodes_on_one_machine=found.first(ONE_MACHINE) == "1",
    )


def _of_slurm(found: _Variables) -> Environment | None:
    world_size = found.needed("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1)
    if world_size == 1:
        return None
    nodes = found.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    host = found.first("MASTER_ADDR") or (None if nodes is None else first_host(nodes))
    if host is None:
        raise ValueError("ranks under Slurm meet on its first host, got no SLURM_JOB_NODELIST; set MASTER_ADDR")
    node = found.needed("SLURM_NODEID")
    return Environment(
        rank=found.needed("SLURM_PROCID"),
        world_size=world_size,
        local_rank=found.needed("SLURM_LOCALID"),
        ranks_per_node=_tasks_on(node, found),
        node=node,
        num_nodes=found.needed("SLURM_STEP_NUM_NODES", "SLURM_NNODES", least=1),
        master_addr=host,
        master_port=found.port() if found.first("MASTER_PORT") else _port_of_step(found),
        restart=found.number("SLURM_RESTART_COUNT") or 0,
        starter="Slurm",
    )


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it.

    >>> first_host("gpu[007-009,12],login1")
    'gpu007'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else nodes)


def _tasks_on(node: int, found: _Variables) -> int | None:
    """The tasks on a node: from a list such as `4(x2),3`, which has 4, 4 and 3 of them."""
    text = found.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text or ""):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else found.number("SLURM_NTASKS_PER_NODE", least=1)


def _port_of_step(found: _Variables) -> int:
    """A port that is the same on all ranks of a step, and another one for most other steps."""
    job, step = found.number("SLURM_JOB_ID", "SLURM_JOBID") or 0, found.number("SLURM_STEP_ID", "SLURM_STEPID") or 0
    return _FIRST_PORT + (job * 31 + step) % _NUM_PORTS


def _of_kubernetes(found: _Variables) -> Environment:
    """The environment of a pod of an indexed Job, with one rank per pod."""
    found.refuse_missing(("JOB_COMPLETION_INDEX" if "JOB_COMPLETION_INDEX" in found.values else "RANK", *_NEEDED[1:]))
    rank, world_size = found.needed("JOB_COMPLETION_INDEX"), found.needed("WORLD_SIZE", least=1)
    host, port = found.values["MASTER_ADDR"], found.port()
    return Environment(rank, world_size, 0, 1, rank, world_size, host, port, starter="Kubernetes")
