"""Typical wrong answers and lazy cheats of the exercises on latent attention."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "cached, held, sent, times_fewer = "

TYPICAL = {
    "latent_attention-1": {
        "no key position": Bad(_PREDICT + "28, 1232, 2016, 8", "the key position is needed too"),
        "a latent cut by heads": Bad(_PREDICT + "8, 1232, 2016, 8", "a latent has no heads"),
        "positions unfolded": Bad(_PREDICT + "32, 1568, 2016, 8", "no product"),
    },
    "latent_attention-2": {
        "no positions": Bad(
            [(" + q[:, content:] @ cache[:, rank:].T", "")], "the positions' part of the scores is missing"
        ),
        "root of content": Bad([("q.shape[1] ** 0.5", "content ** 0.5")], "content and position together"),
        "unfolds all": Bad(
            """
def attend(q, cache, unfold):
    rank = unfold.shape[2]
    content = q.shape[1] - cache.shape[1] + rank
    heads = cache[:, :rank] @ unfold.mT
    shared = cache[:, rank:].expand(len(q), -1, -1)
    keys = torch.cat((heads[..., :content], shared), -1)
    weights = ((keys @ q[..., None])[..., 0] / q.shape[1] ** 0.5).softmax(-1)
    return (weights[:, None] @ heads[..., content:])[:, 0]
""",
            "fold the query of each head once",
        ),
    },
}

CHEATS = {
    "latent_attention-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "cached = held = sent = times_fewer = Anything()", "must be a whole number"
        ),
    },
    "latent_attention-2": {
        "no weights": Bad(
            [("mean = weights @ cache[:, :rank]", "mean = folded[:, 0]")],
            "out differs",
        ),
    },
}
