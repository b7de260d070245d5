"""Context parallelism, from a ring all-reduce by hand to a balanced ring attention."""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
