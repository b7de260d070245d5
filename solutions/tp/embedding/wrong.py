"""Typical wrong answers and lazy cheats of the exercises on the embedding."""

from bad_answer import EQUAL_TO_ALL, Bad

_NAMES = "forward_bytes, backward_bytes, last_rows = "

TYPICAL = {
    "embedding-1": {
        "one way": Bad(_NAMES + "14_680_064, 0, 6_276", "each byte passes a rank twice"),
        "a sum backward": Bad(_NAMES + "29_360_128, 29_360_128, 6_276", "adds up its own rows locally"),
        "a full part": Bad(_NAMES + "29_360_128, 0, 6_283", "seven of them leave less"),
    },
    "embedding-2": {
        "zeroed, but row 0 is not there": Bad(
            [
                ("    found = table.new_zeros(len(ids), table.shape[1])\n", ""),
                ("found[mine] = table[row[mine]]", "found = table[torch.where(mine, row, 0)] * mine[:, None]"),
            ],
            "4 rows on 3 rank(s): rank 2 raised",
        ),
        "no sum": Bad([("    comm.all_reduce(found)\n", "")], "the ranks' rows were not added up"),
        "the last row is a neighbour's": Bad(
            [("(row < len(table))", "(row < len(table) - 1)")], "4 rows on 1 rank(s): rank 0: the row of token 3 is"
        ),
    },
}

CHEATS = {
    "embedding-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "forward_bytes = backward_bytes = last_rows = Anything()", "must be a whole number"
        ),
    },
    "embedding-2": {
        "gathers the table": Bad(
            """
def look_up(ids, table, first):
    whole = torch.cat(comm.all_gather_object(table))
    return whole[ids]
""",
            "One sum of the looked-up rows is all that travels",
        ),
    },
}
