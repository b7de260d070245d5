"""Right answers of another style to the exercises on planning a run."""

RIGHT = {
    "plan_your_run-3": {
        "zero bubble": """
plan = lab.Plan(pp=2, dp=2, cp=4, zero=1, num_microbatches=32, schedule="zero_bubble_h1", precision="bfloat16")
""",
        "tp inside": """
plan = lab.Plan(
    pp=2, dp=4, tp=2, zero=1, num_microbatches=16, schedule="zero_bubble_h1", sequence_parallel=True,
    precision="bfloat16",
)
""",
    },
}
