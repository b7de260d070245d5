"""`fitted` and `agree`: a training goes on in the world that has come, which may be smaller or larger than before.

Chapter: book/whole/training.  In: a plan, the ranks that were started, a folder of checkpoints.  Out: a plan for these
ranks, and the checkpoint that all of them read.
  size         the nearest legal plan of so many ranks; the global batch and so the curve of the loss stay as they are
  checkpoint   the last one of the folder, if there is one; the ranks compare what they see before they read it
Elsewhere: `torchrun --nnodes 1:4 --max-restarts 3` starts the script again with the ranks that are left; torchft keeps
the living ranks and changes the number of data ranks alone.
"""

from pathlib import Path
from socket import gethostname

from dualpipe_lab import comm
from dualpipe_lab.dp.checkpoint.folder import latest, saved_steps
from dualpipe_lab.launch.cluster.environment import Environment
from dualpipe_lab.plan import Plan
from dualpipe_lab.train.options import Config, Options


def fitted(plan: Plan, config: Config, options: Options, started: Environment | None) -> Plan:
    """Return the plan for the ranks that were started: itself, or the nearest one that fits model and batch.

    Args:
        plan: how the model is trained in a world of its size.
        config: of the model.
        options: of the training.
        started: from `lab.cluster`; None where no starter has started the ranks.

    Raises:
        ValueError: no plan of so many ranks fits.
    """
    if started is None or not isinstance(plan, Plan) or started.world_size == plan.world_size:
        return plan
    nearest = plan.nearest(config, options.sequence_length, started.world_size, options.global_batch)
    if nearest is None:
        raise ValueError(
            f"{started.world_size} ranks have come instead of the {plan.world_size} of {plan}, and no plan of so many "
            f"fits the model and a global batch of {options.global_batch} sequences; start another number of ranks"
        )
    if started.rank == 0:
        come = "1 rank has" if started.world_size == 1 else f"{started.world_size} ranks have"
        print(f"{come} come instead of {plan.world_size}: {nearest} instead of {plan}")
    return nearest


def last_checkpoint(options: Options, otherwise: Path | None) -> Path | None:
    """Return the last checkpoint of the training's folder; `otherwise` where it has none yet.

    Raises:
        ValueError: the training has no folder.
    """
    if options.folder is None:
        raise ValueError("elastic=True goes on from the training's own checkpoints, got folder=None; give folder=")
    return latest(options.folder) if saved_steps(options.folder) else otherwise


def agree(resume: Path | None) -> None:
    """Refuse to go on from different checkpoints; every rank calls this.

    Raises:
        ValueError: on every rank, where one sees another checkpoint than rank 0, or none.
    """
    seen = comm.all_gather_object((None if resume is None else str(resume), gethostname()))
    others = [rank for rank, (path, _) in enumerate(seen) if path != seen[0][0]]
    if not others:
        return
    (first, host), (path, other_host) = seen[0], seen[others[0]]
    raise ValueError(
        f"the ranks do not see one folder of checkpoints: rank 0 on {host} goes on from {first or 'none'}, rank "
        f"{others[0]} on {other_host} from {path or 'none'}; give a folder that every host shares"
    )
