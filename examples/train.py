"""Train a small model on the text of the course, under any plan.

    python examples/train.py --pp 2 --tp 2 --num-microbatches 4
    torchrun --nproc-per-node 4 examples/train.py --pp 2 --tp 2 --num-microbatches 4

Stop it with Ctrl-C, and go on under another plan: --folder runs/first, then --folder runs/first --resume --dp 2.
With --elastic it goes on by itself, also with fewer or more ranks, when it is started again:

    torchrun --nnodes 1:4 --nproc-per-node 2 --max-restarts 3 examples/train.py --dp 8 --folder runs/first --elastic
"""

import argparse
import sys

import dualpipe_lab as lab
from dualpipe_lab import data, models, train

COUNTS = ("pp", "dp", "cp", "tp", "ep", "num_microbatches")
MODELS = {"llama": models.LlamaConfig(num_layers=4), "v3": models.V3MoEConfig(num_layers=4)}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in COUNTS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b", choices=lab.schedules.names())
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--precision", default="float32", choices=lab.plan.PRECISIONS)
    parser.add_argument("--model", default="llama", choices=MODELS)
    parser.add_argument("--start", help="a published folder to begin with; the model is the folder's")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--folder", help="where checkpoints are saved")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of the folder")
    parser.add_argument("--elastic", action="store_true", help="--resume if there is one, with as many ranks as come")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--traces", help="a folder for the traces of the ranks; lab.read_traces merges them")
    parser.add_argument("--trace-every", type=int, default=100, help="steps between two that are recorded")
    parser.add_argument("--csv", help="a file for the metrics")
    parser.add_argument("--sample", default="A rank ", help="a beginning that the model in --folder continues")
    chosen = parser.parse_args()
    if chosen.steps < 1:
        parser.error(f"--steps counts from 1, got {chosen.steps}")
    if (chosen.resume or chosen.elastic) and not chosen.folder:
        name = "--resume" if chosen.resume else "--elastic"
        parser.error(f"{name} goes on from the last checkpoint of a folder; give --folder")
    return chosen


def main() -> None:
    """Train, and print the metrics and a text."""
    chosen = parse()
    fields = (*COUNTS, "schedule", "zero", "sequence_parallel", "precision")
    plan = lab.Plan(**{name: getattr(chosen, name) for name in fields})
    result = train.run(
        models.config_from_pretrained(chosen.start) if chosen.start else MODELS[chosen.model],
        plan,
        data.frozen_corpus(),
        steps=chosen.steps,
        resume=chosen.folder if chosen.resume else None,
        evaluation=data.frozen_corpus("evaluation"),
        evaluate_every=50,
        sequence_length=chosen.sequence_length,
        global_batch=chosen.global_batch,
        lr=chosen.lr,
        schedule=train.LRSchedule("cosine", num_warmup=min(10, chosen.steps - 1), num_steps=chosen.steps, final=0.1),
        start=None if chosen.resume else chosen.start,
        folder=chosen.folder,
        save_every=chosen.save_every if chosen.folder else None,
        elastic=chosen.elastic,
        traces=chosen.traces,
        trace_every=chosen.trace_every,
        csv=chosen.csv,
    )
    started = lab.cluster()
    if started is None or started.rank == 0:  # torchrun runs this script once per rank
        print(result)
        if chosen.sample and result.checkpoint is not None:
            text = train.generate(result.checkpoint, chosen.sample, 200, temperature=0.5)
            print(f"text: {text}")
    sys.exit(result.exit_code)


if __name__ == "__main__":
    main()
