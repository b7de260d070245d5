"""Right answers of another style to the exercises on the asynchronous all-to-all."""

RIGHT = {
    "async_all_to_all-3": {
        "lists": """
def moe(x0, x1, splits, expert):
    there = [issue_dispatch(x, splits) for x in (x0, x1)]
    back = [combine_async(expert(rows.wait()), splits) for rows in there]
    return [rows.wait() for rows in back]
""",
        "the second microbatch first": """
def moe(x0, x1, splits, expert):
    there1 = issue_dispatch(x1, splits)
    there0 = issue_dispatch(x0, splits)
    back1 = combine_async(expert(there1.wait()), splits)
    back0 = combine_async(expert(there0.wait()), splits)
    y1 = back1.wait()
    return back0.wait(), y1
""",
    },
}
