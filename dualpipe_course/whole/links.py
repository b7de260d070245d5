"""Exercises of "Which axis on which link": six numbers of a grid.

Chapter: book/whole/links.  Bytes are whole numbers.
"""

from dualpipe_course.declared import Predict

NAMES = (
    "S along tp",
    "S along dp",
    "S along pp",
    "S with cut tokens",
    "S between nodes",
    "S between nodes, dp outside",
)
_SLIPS = (
    {
        256: "of an all-reduce, a rank sends 2 (t - 1) / t of its size",
        768: "a stage has 4 of the 16 layers",
        24: "that is one microbatch",
        96: "an all-reduce sends every byte about twice",
        48: "a layer has four all-reduces",
    },
    {
        12: "a rank sends 2 (N - 1) / N of its gradients, and N is 2",
        24: "tp cuts the gradients of a stage",
        96: "a rank has a quarter of the layers, and a quarter of their matrices",
        3: "an all-reduce of two ranks sends the size once",
        48: "the gradients are summed once per step, not once per microbatch",
    },
    {
        8: "a stage in the middle has two neighbours: activations go on, gradients go back",
        32: "a rank sends one activation and one gradient per microbatch; it receives as many",
        2: "that is one microbatch",
    },
    {
        192: "the second gather is missing",
        288: "each pair gathers once more, not twice",
        384: "a half sends half of what an all-reduce sends",
        216: "both pairs of a layer gather once more",
    },
    {
        512: "four stages have three borders: no stage follows the last one",
        192: "activations cross one way, their gradients the other",
        48: "there are 8 pipelines side by side, one for each place in dp and tp",
        128: "that is one border",
    },
    {
        192: "a node holds two of the four stages: one border of each pipeline crosses as well",
        576: "only the border between the second and the third stage crosses, not all three",
        448: "of two directions and three borders, one border crosses: the others lie inside a node",
        128: "that is pp; along dp every rank sends to another node",
        256: "activations cross one way, their gradients the other",
    },
)


numbers = Predict(
    "links-1",
    "Six numbers of a grid",
    NAMES,
    lambda layers, m: (1.5 * layers * m, 3 / 8 * layers, 2 * m, 15 / 8 * layers * m, 48 * m, 16 * m + 12 * layers),
    "{layers} layers train on",
    "with {m} microbatches per step",
    minutes=12,
    points=2,
    hints=(
        "The table of the page has a row for each axis; put L / p = 4, m = 8, t = 4 and N = 2 into them.",
        "An all-reduce is a reduce-scatter and an all-gather. How many of these halves has a layer with cut tokens?",
        "A node holds the axes to the right, as far as their product is 8. Which hops of the next axis stay inside?",
    ),
    slips=_SLIPS,
    layers=(16, 8, 24, 32),
    m=(8, 4, 6, 10, 12, 16),
    called={"m": "microbatches"},
)
