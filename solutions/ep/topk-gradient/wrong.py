"""Typical wrong answers and lazy cheats of the exercises on the gradient of a choice."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "as_they_are, normalised, single, weight_bytes, balance_bytes = "
_SIGMOID = "def logit_gradient(logits, indices, grad, scale):\n"
_SHARE = "def balance_share(logits, indices):\n"
_ROUTE = "def route(logits, k):\n    scores, indices = logits.softmax(-1).topk(k)\n    return indices, "

TYPICAL = {
    "topk_gradient-1": {
        "chosen alone": Bad(_PREDICT + "12, 12, 0, 768, 108", "also of those that were not asked"),
        "nothing cancels": Bad(_PREDICT + "48, 48, 0, 768, 108", "has cancelled"),
        "one expert learns": Bad(_PREDICT + "48, 12, 6, 768, 108", "whatever p is"),
    },
    "topk_gradient-2": {
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
        "denominator detached": Bad(
            [("(grad - (shares * grad).sum(-1, keepdim=True))", "grad")], "1 token(s), 3 experts, k = 2"
        ),
    },
    "topk_gradient-3": {
        "own load": Bad([("    comm.all_reduce(counts)\n", "")], "the load of its own tokens alone"),
        "own number of tokens": Bad([("/ num_tokens", "/ max(len(logits), 1)")], "count the tokens of all"),
        "no gradient": Bad([("logits.softmax", "logits.detach().softmax")], "rank 0: gradient 0 of token 0 is 0"),
    },
    "topk_gradient-4": {
        "never normalised": Bad([("normalise=k > 1", "normalise=False")], "k = 2: weight 0 of token 0"),
        "normalised for two": Bad([("normalise=k > 1", "normalise=k == 2")], "5 experts, k = 3: weight 0"),
        "detached": Bad(
            _ROUTE + "scores / scores.sum(-1, keepdim=True).detach()",
            "k = 1: weight 0 of token 0 is 1",
        ),
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
