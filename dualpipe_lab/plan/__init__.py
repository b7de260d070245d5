"""Plans: how many ranks along each axis, which schedule, which ZeRO stage; checked, listed and counted before a run."""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
