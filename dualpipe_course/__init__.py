"""The course beside the library: checks, hints and progress for learners, grading for teachers.

Notebooks write `from dualpipe_course import check`.  The library imports nothing from here.
  check             the checks of every exercise, by chapter: `check.gpipe.makespan(answer)`
  <part>/<topic>    one module per chapter: each check with its title, kind, minutes, points and hints
  grading           submitted notebooks in, a table of points out
  commands          `dualpipe-lab grade` and `dualpipe-lab progress`
"""
