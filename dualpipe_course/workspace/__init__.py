"""The learner's own folder: copies of the course's notebooks to work in, renewed without losing anything.

Modules:
contents     the pages of the course in reading order, from _toc.yml, and the place of each copy
pages        one copy: a page's notebook with working links and the outputs of the last build
given        what was given out, so that the learner's changes are told from the course's
renew        make and renew the copies; start one afresh
start_page   the page that JupyterLab opens first: parts, progress, where to go on
lab          JupyterLab on the folder, with the settings of `jupyter/`
"""
