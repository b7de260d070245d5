"""A small checkout of the course, and a learner who works in copies of it."""

import pytest
from small_course import Course, Learner


@pytest.fixture
def course(tmp_path):
    return Course(tmp_path / "course")


@pytest.fixture
def learner(course, tmp_path):
    return Learner(course, tmp_path / "mine")
