"""1F1B for MoE layers: orders on two streams, their exact simulation, and their execution on real ranks.

Chapters: book/ep/one-f-one-b-basic, book/ep/one-f-one-b-overlap.
Orders, simulation and closed forms are pure data.  What runs them on tensors imports torch:
`overlap.executor`, `overlap.layer`, `overlap.stage`.
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
