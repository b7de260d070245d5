"""Models: plain ones for one process, and the same models sharded over the axes of a topology."""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
