"""What tests of published figures share: how errors are reported."""

from statistics import median


def report(what, errors):
    """Print the number of rows, the median and the worst of some errors, and return both."""
    errors = list(map(abs, errors))
    print(f"{what}: {len(errors)} rows, median error {median(errors):.2%}, worst {max(errors):.2%}")
    return median(errors), max(errors)
