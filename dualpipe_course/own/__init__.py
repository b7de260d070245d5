"""The learner's own trainer: 29 parts, one file each, that become the package `mine`.

In: the text of a part, from a cell or a file.  Out: a verdict, the file, and what `mine.<part>` is from then on.
Modules:
parts      the parts in the order of the trail, with the pages on which they are written
finder     where `mine.<part>` comes from: the learner's text or the course's
rules      what a part may import and call, read from its syntax tree
folder     `mine/` in the learner's folder: files, hashes of their last pass, `old/`
part       `Part`: the check of a part, on ranks, over the parts before it
runs       four trainings that the parts make possible, each beside one process
"""
