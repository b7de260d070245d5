"""Which ranks communicate with each other: axes, groups and coordinates, as arithmetic.

Chapter: book/dp/topology.  In: axes with their sizes.  Out: groups of ranks, one rank's neighbours.
"""

from dualpipe_lab.topology.grid import AXES, RankCoordinates, Topology

__all__ = ["AXES", "RankCoordinates", "Topology"]
