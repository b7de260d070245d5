"""Which rank talks to whom: axes, groups and places, as arithmetic.

Chapter: book/dp/topology.  In: axes with their sizes.  Out: groups of ranks, one rank's neighbours, a drawing.
"""

from dualpipe_lab.topology.grid import AXES, Topology
from dualpipe_lab.topology.seat import Seat

__all__ = ["AXES", "Seat", "Topology"]
