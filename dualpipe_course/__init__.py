"""The course beside the library: checks, hints and progress for learners, grading for teachers.

Notebooks write `from dualpipe_course import check`.  The library imports nothing from here.
  check             the checks of every exercise, by chapter: `check.gpipe.makespan(answer)`
  declared          what an exercise declares, by kind, and the harness that judges it
  <part>/<topic>    one module per chapter: its exercises, and what they need to be judged
  grading           submitted notebooks in, a table of points out
  commands          `dualpipe-lab grade` and `dualpipe-lab progress`
"""
