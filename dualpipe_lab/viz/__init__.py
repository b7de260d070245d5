"""Pictures of timelines, tensors, collectives and measurements, drawn from runs and simulations.

Chapter: book/start/time.  In: timelines, tensors on ranks, numbers.  Out: text, SVG, HTML pages, widgets, figures.
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
