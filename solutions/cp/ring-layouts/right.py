"""Right answers of another style to the exercises on layouts for context parallelism."""

RIGHT = {
    "ring_layouts-3": {
        "moved the other way": "owner = tuple((p - p // 4) % 4 for p in range(24))",
        "rows by hand": """
rows = "0123", "3012", "2301", "1230", "0123", "3012"
owner = [int(rank) for row in rows for rank in row]
""",
    },
}
