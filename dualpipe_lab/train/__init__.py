"""Training: data, steps, metrics and checkpoints of one model under any plan."""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
