"""A plan in the settings of other frameworks, with what they have no setting for; and in those of this library."""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
