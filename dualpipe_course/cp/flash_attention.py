"""Exercises of "FlashAttention-2": what is kept, and what is computed.

Chapter: book/cp/flash-attention.
"""

from collections.abc import Sequence

from dualpipe_course.declared import Predict

NAMES = ("bytes kept in tiles", "bytes kept naively", "tiles computed", "tiles of the later half")
_SLIPS = (
    {
        786_432: "these are Q, K, V and O; every query of every head keeps one LSE too",
        540_672: "O is kept as well: the backward needs it for dO . O",
        1_064_960: "keys and values have 2 heads; they are not copied for the 4 query heads",
        819_200: "m and l are not kept, but one number made of them",
        200_704: "a float32 has 4 bytes",
    },
    {
        16_777_216: "these are the weights; Q, K and V are kept too",
        17_563_648: "O is not needed where the weights are kept",
        4_718_592: "each of the 4 query heads has a matrix of weights",
        34_078_720: "weights alone are enough for the backward of a softmax; scores are not kept",
        4_325_376: "a float32 has 4 bytes",
    },
    {
        64: "half of them lie above the diagonal, and no query sees a key there",
        28: "tiles on the diagonal are seen in part, and computed",
        32: "the diagonal is not cut in two: its tiles are computed as a whole",
    },
    {
        10: "that is top-left; the last query is aligned with the last key here",
        32: "a tile that no query sees is skipped here too",
        22: "tiles on the diagonal are computed as well",
    },
)


def _bytes_and_tiles(q: int, kv: int, d: int, tile: int) -> Sequence[int]:
    rows, half = 1024 // tile, 512 // tile
    inputs = (q + 2 * kv) * d
    tiled, naive = 1024 * 4 * (inputs + q * d + q), 4 * (1024 * inputs + q * 1024**2)
    return tiled, naive, rows * (rows + 1) // 2, rows * (rows + 1) // 2 - half * (half + 1) // 2


numbers = Predict(
    "flash_attention-1",
    "A thousand positions",
    NAMES,
    _bytes_and_tiles,
    "{q} query heads and {kv} key and value heads of {d} numbers each",
    "a tile has {tile} by {tile} scores",
    minutes=12,
    points=2,
    hints=(
        "In tiles a position keeps 4 rows of Q, 4 of O, 2 of K and 2 of V, 16 numbers each, and 4 LSEs.",
        "Naively: Q, K and V as before, and 1,024 x 1,024 weights for each of 4 heads.",
        "8 tiles in a row: the first row of tiles computes 1, the last 8. The later half of the queries begins with "
        "its fifth row.",
    ),
    slips=_SLIPS,
    q=(4, 6, 8, 10, 12),
    kv=(2,),
    d=(16, 8, 24, 32),
    tile=(128, 64, 256),
    called={"q": "query heads", "kv": "key and value heads", "d": "numbers of a head"},
)
