"""Right answers of another style to the exercises on gradient checkpointing."""

RIGHT = {
    "gradient_checkpointing-2": {
        "hooks on what autograd saves": """
def recompute(segment, *inputs):
    state, found = torch.get_rng_state(), {}
    saved = [x for x in inputs if isinstance(x, torch.Tensor)]
    number = iter(range(10**9))

    def pack(x):
        return next(number)

    def unpack(place):
        if not found:
            now, again = torch.get_rng_state(), iter(range(10**9))
            torch.set_rng_state(state)

            def keep(x):
                found[next(again)] = x.detach()

            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda _: None):
                asks = [isinstance(x, torch.Tensor) and x.requires_grad for x in inputs]
                segment(*[x.detach().requires_grad_() if ask else x for x, ask in zip(inputs, asks)])
            torch.set_rng_state(now)
        return found[place]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return segment(*inputs)
""",
        "torch.autograd.grad, random state in a context": [
            (
                "        now = torch.get_rng_state()\n        torch.set_rng_state(ctx.random_state)\n"
                "        with torch.enable_grad():\n            y = ctx.segment(*inputs)\n"
                "        torch.set_rng_state(now)\n        torch.autograd.backward(y, dy)\n",
                "        with torch.random.fork_rng(), torch.enable_grad():\n"
                "            torch.set_rng_state(ctx.random_state)\n"
                "            y = ctx.segment(*inputs)\n"
                "            y.backward(dy)\n",
            ),
        ],
    },
}
