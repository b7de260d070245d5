"""Right answers of another style to the exercises on the museum of defects."""

RIGHT = {
    "museum-2": {
        "a table of readings": """
def first_difference(sound, suspect):
    def numbers(log):
        return {
            "forward": log["losses"][:1],
            "gradient": log["norms"][:1],
            "update": log["losses"][1:] + log["norms"][1:],
            "cost": [log["sent"], log["time"], log["peak"]],
        }

    ours, theirs = numbers(sound), numbers(suspect)
    for place, right in ours.items():
        found = theirs[place]
        tolerance = 0 if place == "cost" else 1e-6
        if len(found) != len(right):
            return place
        if any(not abs(a - b) <= tolerance * abs(a) for a, b in zip(right, found)):
            return place
    return "nothing"
""",
        "tensors": """
def first_difference(sound, suspect):
    def same(name, steps):
        a, b = (torch.tensor(log[name][steps], dtype=torch.float64) for log in (sound, suspect))
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=0)

    first, later = slice(0, 1), slice(1, None)
    if not same("losses", first):
        return "forward"
    if not same("norms", first):
        return "gradient"
    if not (same("losses", later) and same("norms", later)):
        return "update"
    costs = ("sent", "time", "peak")
    return "nothing" if [sound[c] for c in costs] == [suspect[c] for c in costs] else "cost"
""",
    },
    "museum-3": {
        "a tuple": """
names = "MeanOfMeans", "SumEveryMicrobatch", "OwnKeysAgain", "ClipScaled", "SameBatches"
""",
        "a split text": """
names = "MeanOfMeans SumEveryMicrobatch OwnKeysAgain ClipScaled SameBatches".split()
""",
    },
}
