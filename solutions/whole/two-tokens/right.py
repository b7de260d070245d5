"""Right answers of another style to the exercises on two tokens at once."""

RIGHT = {
    "two_tokens-3": {
        "tensors": """
import torch

def rows(documents):
    parts = []
    for document in map(torch.tensor, documents):
        none = torch.tensor([-100, -100])
        first, second = torch.cat((document[1:], none[:1])), torch.cat((document[1:], none))[1:]
        parts.append(torch.stack((document, first, first.clamp(min=0), second)))
    return torch.cat(parts, 1)
""",
        "by the number of each token's document": """
def rows(documents):
    flat = [(number, token) for number, document in enumerate(documents) for token in document]

    def at(place, ahead, end):
        mine = flat[place][0]
        found = flat[place + ahead] if place + ahead < len(flat) else (None, end)
        return found[1] if found[0] == mine else end

    places = range(len(flat))
    return tuple([at(p, ahead, end) for p in places] for ahead, end in ((0, 0), (1, -100), (1, 0), (2, -100)))
""",
    },
}
