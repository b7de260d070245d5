"""Forked kernels, for the book and the replay of solutions: Jupyter calls `provisioner`, and that `fork_server`."""
