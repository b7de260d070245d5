"""Right answers of another style to the exercises on the LM head."""

RIGHT = {
    "lm_head-2": {
        "concatenated": """
def padded_loss(x, weight, targets, first, vocabulary_size):
    real = min(max(vocabulary_size - first, 0), len(weight))
    logits = copy_to_ranks(x) @ weight[:real].t()
    logits = torch.cat([logits, logits.new_full((len(x), len(weight) - real), -torch.inf)], 1)
    return cross_entropy(logits, targets, len(weight) * comm.get_world_size())
""",
        "a very large negative number": [("-torch.inf", "torch.finfo(logits.dtype).min")],
    },
}
