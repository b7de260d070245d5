"""1F1B for MoE layers: orders of operations on two streams, their exact simulation, and their execution on ranks.

Chapters: book/ep/one-f-one-b-basic, book/ep/one-f-one-b-overlap.
Orders, simulation and closed forms are pure data.  The modules that execute them on tensors import torch:
`overlap.executor`, `overlap.stage`, `overlap.emulated`.
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
