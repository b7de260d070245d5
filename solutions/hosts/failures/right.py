"""Right answers of another style to the exercises on failures."""

RIGHT = {
    "failures-3": {
        "beats that were seen first": """
def silent(looks, ranks, limit):
    first_seen = {rank: (looks[0][0], None) for rank in ranks}
    answer = []
    for now, beats in looks:
        for rank, (number, _) in beats.items():
            if first_seen[rank][1] != number:
                first_seen[rank] = now, number
        answer.append({rank for rank in ranks if first_seen[rank][0] + limit < now})
    return answer
""",
        "backwards from each look": """
def silent(looks, ranks, limit):
    found = []
    for last, (now, beats) in enumerate(looks):
        here = []
        for rank in ranks:
            number = beats[rank][0] if rank in beats else 0
            since = now
            for earlier, other in reversed(looks[:last]):
                if (other[rank][0] if rank in other else 0) != number:
                    break
                since = earlier
            if now - since > limit:
                here.append(rank)
        found.append(tuple(here))
    return tuple(found)
""",
    },
}
