"""Right answers of another style to the exercises on weights from elsewhere."""

RIGHT = {
    "weights-3": {
        "rows by their numbers": [
            (
                '        heads = state[f"{old}qkv"].unflatten(0, (num_kv_heads, -1, size))\n'
                "        q, k, v = heads.split([num_heads // num_kv_heads, 1, 1], 1)\n",
                "        width = (num_heads // num_kv_heads + 2) * size\n"
                '        fused = state[f"{old}qkv"]\n'
                "        place = torch.arange(len(fused)) % width\n"
                "        q = fused[place < width - 2 * size][None, None]\n"
                "        k = fused[(place >= width - 2 * size) & (place < width - size)][None, None]\n"
                "        v = fused[place >= width - size][None, None]\n",
            ),
        ],
        "one name after the other": """
def renamed(state, num_heads, num_kv_heads):
    plain = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
    ends = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    found = {}
    for name, tensor in state.items():
        if name in ends:
            found[ends[name] + ".weight"] = tensor.clone()
            continue
        _, number, what = name.split(".")
        at = f"model.layers.{number}."
        if what in plain:
            found[at + plain[what] + ".weight"] = tensor
        elif what == "gate_up":
            found[at + "mlp.gate_proj.weight"] = tensor[: len(tensor) // 2]
            found[at + "mlp.up_proj.weight"] = tensor[len(tensor) // 2 :]
        elif what == "qkv":
            size = len(tensor) // (num_heads + 2 * num_kv_heads)
            groups = tensor.chunk(num_kv_heads)
            cut = len(groups[0]) - 2 * size
            found[at + "self_attn.q_proj.weight"] = torch.cat([group[:cut] for group in groups])
            found[at + "self_attn.k_proj.weight"] = torch.cat([group[cut : cut + size] for group in groups])
            found[at + "self_attn.v_proj.weight"] = torch.cat([group[cut + size :] for group in groups])
        else:
            where = "self_attn.o_proj" if what == "out" else "mlp.down_proj"
            found[at + where + ".weight"] = tensor.t().contiguous()
    return found
""",
    },
    "weights-4": {
        "even rows, then odd ones": [
            (
                "        pairs = weight.unflatten(0, (heads, -1, 2))\n"
                "        return pairs.transpose(1, 2).flatten(0, 2)\n",
                "        parts = [part for head in weight.chunk(heads) for part in (head[::2], head[1::2])]\n"
                "        return torch.cat(parts)\n",
            ),
        ],
        "an index": """
def to_halves(q, k, num_heads, num_kv_heads):
    size = len(q) // num_heads
    order = [*range(0, size, 2), *range(1, size, 2)]
    def rows(heads):
        return [head * size + row for head in range(heads) for row in order]
    return q[rows(num_heads)], k[rows(num_kv_heads)]
""",
    },
}
