"""The parts of a trainer, as the course writes them: plain torch over four functions of `dualpipe_lab.comm`.

One file per part, in the order of the trail; earlier files import no later one.  `ranks` is a list of global ranks in
the order of a group, tokens are dimension 0, rows are the library's text.  `plain_model`, which knows none of them, is
the same training in one process.
"""
