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
        "bytes of dW": Bad(_PREDICT + "48, 12, 0, 512, 108", "2 (N - 1) / N"),
        "no count of tokens": Bad(_PREDICT + "48, 12, 0, 768, 96", "the number of tokens is summed too"),
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
        "powers of large logits": Bad(
            [("torch.nn.functional.logsigmoid(chosen)", "(chosen - torch.log1p(chosen.exp()))")], "logits near 800"
        ),
        "denominator detached": Bad(
            [("(grad - (shares * grad).sum(-1, keepdim=True))", "grad")], "1 token(s), 3 experts, k = 2"
        ),
        "a softmax of all": Bad(
            _SIGMOID + "    p = logits.softmax(-1)\n    g = torch.zeros_like(p).scatter(-1, indices, scale * grad)\n"
            "    return p * (g - (p * g).sum(-1, keepdim=True))",
            "gradient 0 of token 0",
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
        "no gradient": Bad([("logits.softmax", "logits.detach().softmax")], "rank 0: gradient 0 of token 0 is 0"),
    },
    "topk_gradient-4": {
        "never normalised": Bad([("normalise=k > 1", "normalise=False")], "k = 2: weight 0 of token 0"),
        "normalised for two": Bad([("normalise=k > 1", "normalise=k == 2")], "5 experts, k = 3: weight 0"),
        "normalised for all or two": Bad([("normalise=k > 1", "normalise=k in (2, logits.shape[1])")], "k = 3"),
        "detached": Bad(
            _ROUTE + "scores / scores.sum(-1, keepdim=True).detach()",
            "k = 1: weight 0 of token 0 is 1",
        ),
        "a sigmoid": Bad(
            [("normalise=k > 1", 'scoring="sigmoid" if k == 1 else "softmax", normalise=k > 1')],
            "k = 1: weight 0 of token 0",
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
        "autograd": Bad(
            _SIGMOID + "    with torch.enable_grad():\n        u = logits.clone().requires_grad_()\n"
            "        v = torch.nn.functional.logsigmoid(u.gather(-1, indices)).softmax(-1)\n"
            "        return torch.autograd.grad(scale * v, u, grad)[0]",
            "switched off",
        ),
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
