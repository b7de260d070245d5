"""Right answers of another style to the exercises on saving and loading."""

RIGHT = {
    "io-4": {
        "under no_grad": """
def resume(saved, adam, rank):
    with torch.no_grad():
        (group,) = adam.param_groups
        for p, value, pair in zip(group["params"], saved["parameters"], saved["moments"], strict=True):
            p[:] = value
            for name, moment in zip(("exp_avg", "exp_avg_sq"), pair):
                adam.state[p][name].copy_(moment)
            adam.state[p]["step"] = saved["num_steps"]
    torch.random.set_rng_state(saved["random"][rank].clone())
    return int(saved["next_batch"])
""",
        "new moments, cloned": [
            ('        state["exp_avg"].copy_(mu)\n        state["exp_avg_sq"].copy_(nu)\n',
             "        state.update(exp_avg=mu.clone(), exp_avg_sq=nu.clone())\n"),
        ],
    },
}  # fmt: skip
