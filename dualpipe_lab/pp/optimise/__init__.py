"""`optimise` and `search`: look for a faster order under given costs and a memory limit, and compare it with a bound.

Chapter: book/pp/explorer.  In: a program or sizes, costs, a limit.  Out: an `Optimum`.
"""

from dualpipe_lab.pp.optimise.bounds import Bound, lower_bound
from dualpipe_lab.pp.optimise.search import Optimum, optimise, search

__all__ = ["Bound", "Optimum", "lower_bound", "optimise", "search"]
