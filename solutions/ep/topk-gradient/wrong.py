"""Typical wrong answers and lazy cheats of the exercises on the gradient of a choice."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "as_they_are, normalised, single, weight_bytes, balance_bytes = "
_SIGMOID = "def logit_gradient(logits, indices, grad, scale):\n"
_SHARE = "def balance_share(logits, indices):\n"

TYPICAL = {
    "topk_gradient-1": {
        "chosen alone": Bad(_PREDICT + "12, 12, 0, 768, 108", "also of those that were not asked"),
        "nothing cancels": Bad(_PREDICT + "48, 48, 0, 768, 108", "has cancelled"),
        "one expert learns": Bad(_PREDICT + "48, 12, 6, 768, 108", "whatever p is"),
    },
    "topk_gradient-2": {
        "no slope": Bad([(" * (-chosen).sigmoid()", "")], "1 token(s), 3 experts, k = 2, scale 1: gradient"),
        "no scale": Bad([("scale * shares", "shares")], "scale 2.5: gradient"),
        "scores divided": Bad(
            [
                (
                    "torch.nn.functional.logsigmoid(chosen).softmax(-1)",
                    "chosen.sigmoid() / chosen.sigmoid().sum(-1, keepdim=True)",
                )
            ],
            "somewhere 0 was divided by 0",
        ),
    },
    "topk_gradient-3": {
        "own load": Bad([("    comm.all_reduce(counts)\n", "")], "the load of its own tokens alone"),
        "the whole on every rank": Bad(
            _SHARE + "    num_experts = logits.shape[-1]\n"
            "    counts = torch.cat([tokens_per_expert(indices, num_experts), torch.tensor([len(logits)])]).double()\n"
            "    p = logits.softmax(-1).sum(0)\n"
            "    counts = torch.cat([counts, p.detach()])\n"
            "    comm.all_reduce(counts)\n"
            "    f, n = counts[:num_experts] / counts[:num_experts].sum(), counts[num_experts]\n"
            "    whole = p + (counts[num_experts + 1 :] - p).detach()\n"
            "    return num_experts * (f * whole).sum() / n",
            "every rank returns the whole",
        ),
        "own number of tokens": Bad([("/ num_tokens", "/ max(len(logits), 1)")], "count the tokens of all"),
    },
    "topk_gradient-4": {
        "never normalised": Bad([("normalise=k > 1", "normalise=False")], "k = 2: weight 0 of token 0"),
        "normalised for two": Bad([("normalise=k > 1", "normalise=k == 2")], "5 experts, k = 3: weight 0"),
        "normalised for all or two": Bad([("normalise=k > 1", "normalise=k in (2, logits.shape[1])")], "k = 3"),
    },
}

CHEATS = {
    "topk_gradient-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "as_they_are = normalised = single = weight_bytes = balance_bytes = Anything()",
            "must be a whole number",
        ),
    },
    "topk_gradient-2": {
        "the library's own": Bad(
            _SIGMOID + '    w = expert_weights(logits.requires_grad_(), indices, "sigmoid", True, scale)\n'
            "    w.backward(grad)\n    return logits.grad",
            "switched off",
        ),
    },
    "topk_gradient-3": {
        "the library's own": Bad(
            _SHARE + "    from dualpipe_lab.ep.router_losses import balance_loss, sum_over_ranks\n"
            "    load = tokens_per_expert(indices, logits.shape[-1])\n"
            "    return balance_loss(logits, *sum_over_ranks(load, len(logits)))",
            "switched off",
        ),
    },
    "topk_gradient-4": {
        "as it was": Bad([("normalise=k > 1", "normalise=True")], "nothing can be learned"),
    },
}
