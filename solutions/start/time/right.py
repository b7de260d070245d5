"""Right answers of another style to the exercises on time."""

RIGHT = {
    "time-3": {
        "another order, as a tuple": "order = (3, 1, 4, 0, 2)",
        "Johnson's rule": """
jobs = check.time.JOBS
first = [i for i in range(5) if jobs[i][0] < jobs[i][1]]
last = [i for i in range(5) if i not in first]
order = sorted(first, key=lambda i: jobs[i][0]) + sorted(last, key=lambda i: -jobs[i][1])
""",
    },
}
