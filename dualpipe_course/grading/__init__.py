"""Grading: a folder of submitted notebooks in, a table of marks that a submission cannot forge out.

  notebook      lays the learner's answer cells over the pristine exercise; other cells of a submission are ignored
  worker        runs the given cells and one answer cell; only the worker and the ranks run the learner's code
  evaluator     runs the pristine check, in a fresh process per exercise; it receives plain values and opaque functions
                from the worker, and data from ranks
  guard         closes checks and solutions to the answer in worker and ranks
  pristine      the copy of library and course that all of them run with
  sandbox       limits time, output, memory and processes of evaluator, worker and ranks, and kills what exceeds them
  replay        runs a whole notebook in the sandbox by nbval, and compares its stored outputs
  graft         writes each submission as the pristine notebook with its answers, for `pytest --nbval`
  marks         what pytest does there: nbval's options, and the points at the end
  protocol      the form of answers between worker and evaluator
  process_tree  finds, measures and kills all descendants of a process
  grader        distributes the submissions, two at a time, and keeps the results
  report        writes the table, CSV and HTML
Printed text is not read, so a submission cannot print its verdict.  The check runs in another process, so a submission
cannot patch it.  Submissions run as the user who grades: hostile code belongs in a container.
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
