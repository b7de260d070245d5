"""Optimise: search for a quicker order under given costs and a limit of memory, and say how far it is from a bound.

Chapter: book/pp/explorer.  In: a program or sizes, costs, a limit.  Out: an `Optimum`.
"""

from dualpipe_lab.pp.optimise.bounds import Bound, lower_bound
from dualpipe_lab.pp.optimise.search import Optimum, optimise, search

__all__ = ["Bound", "Optimum", "lower_bound", "optimise", "search"]
