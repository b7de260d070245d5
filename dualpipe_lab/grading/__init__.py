"""Grading: a folder of submitted notebooks in, a table that can be trusted out.

  notebook   the learner's answer cells over the pristine exercise; everything else of the submission counts for nothing
  worker     runs given cells and one answer cell; the only process besides the ranks that runs the learner's code
  judge      runs the pristine check, in a fresh process for each exercise; gets plain values and opaque functions from
             the worker and data from ranks, never the learner's code
  warden     watches judge, worker and ranks: time, output, memory, processes; ends what goes beyond
  grader     hands out the work, two submissions at a time, and remembers what is done
  report     table, CSV, HTML
A submission cannot print its verdict, because what it prints is not looked at; it cannot patch its check, because the
check runs in another process.  It runs as the user who grades: hostile code belongs in a container.
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
