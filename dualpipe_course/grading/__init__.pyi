# Submissions in, a report out
from . import submissions as submissions
from .grader import Grader as Grader
from .limits import Limits as Limits
from . import report as report
