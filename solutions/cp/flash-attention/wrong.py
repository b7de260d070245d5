"""Typical wrong answers and lazy cheats of the exercises on FlashAttention-2."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "tiled_bytes, naive_bytes, num_tiles, num_later = "

TYPICAL = {
    "flash_attention-1": {
        "no LSE": Bad(_PREDICT + "786_432, 17_301_504, 36, 26", "keeps one LSE too"),
        "copies the keys": Bad(_PREDICT + "1_064_960, 17_301_504, 36, 26", "not copied"),
        "weights alone": Bad(_PREDICT + "802_816, 16_777_216, 36, 26", "Q, K and V are kept too"),
    },
}

CHEATS = {
    "flash_attention-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "tiled_bytes = naive_bytes = num_tiles = num_later = Anything()", "must be a whole number"
        ),
    },
}
