"""Right answers of another style to the exercises on the museum of defects."""

RIGHT = {
    "museum-3": {
        "a tuple": """
names = "MeanOfMeans", "SumEveryMicrobatch", "OwnKeysAgain", "ClipScaled", "SameBatches"
""",
        "a split text": """
names = "MeanOfMeans SumEveryMicrobatch OwnKeysAgain ClipScaled SameBatches".split()
""",
    },
}
