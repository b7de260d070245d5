"""One step of DualPipeV beside one process: equal loss, equal gradients, equal outputs.

    python examples/dualpipev.py --ranks 4 --microbatches 8
    torchrun --nproc-per-node 4 examples/dualpipev.py --microbatches 8

Every rank holds two stages of a V: rank 0 has the first and the last one, so no stage has a copy.  The rest is as in
`dualpipe.py`, the script beside this one.
"""

from dualpipe import main

if __name__ == "__main__":
    main("dualpipev", __doc__)
