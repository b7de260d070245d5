"""Right answers of another style to the exercises on Zero Bubble."""

RIGHT = {
    "zero_bubble-2": {
        "torch's functions, new tensors": [
            ("(x @ self.w1.T).clamp(min=0)", "torch.relu(nn.functional.linear(x, self.w1))"),
            ("return h @ self.w2.T", "return torch.tensordot(h, self.w2, dims=([1], [1]))"),
            ("da = dy @ self.w2 * (h > 0)", "da = torch.where(h == 0, 0.0, torch.mm(dy, self.w2))"),
            ("self.dw1 += da.T @ x", "self.dw1 = torch.addmm(self.dw1, da.T, x)"),
            ("self.dw2 += dy.T @ h", "self.dw2 = self.dw2.add(dy.mT.matmul(h))"),
        ],
        "row by row": [
            ("self.dw1 += da.T @ x", "for g, a in zip(da, x):\n            self.dw1 += torch.outer(g, a)"),
            ("self.dw2 += dy.T @ h", "for g, a in zip(dy, h):\n            self.dw2.addr_(g, a)"),
        ],
    },
    "zero_bubble-3": {
        "B where W follows at once": [(f"0I{m} 0W{m}", f"0B{m}") for m in range(6)],
        "one text of four lines": [
            ("rows = [\n", "rows = '''\n"),
            ('    "', ""),
            ('",\n', "\n"),
            ("\n]", "\n'''"),
        ],
    },
    "zero_bubble-4": {
        "backward with inputs": """
def follow(stage, row, inputs, dys):
    runs, arrived, out = {}, {}, []
    for word in row.split():
        m = int(word[1:])
        if word.startswith("F"):
            x = inputs[m].clone().detach().requires_grad_(True)
            runs[m] = (x, stage(x))
        elif word.startswith("I"):
            x, y = runs[m]
            y.backward(dys[m], inputs=[x], retain_graph=True)
            arrived[m] = dys[m]
            out.append(x.grad)
        elif m in arrived:
            runs.pop(m)[1].backward(arrived.pop(m), inputs=list(stage.parameters()))
        else:
            raise ValueError(f"W{m} has nothing to work with")
    return out
""",
        "what is due is a function": [
            (
                "due[m] = dys[m]\n            sent += torch.autograd.grad(y, x, due[m], retain_graph=True)",
                "due[m] = lambda y=y, dy=dys[m]: torch.autograd.grad(y, parameters, dy)\n"
                "            sent.append(torch.autograd.grad([y], [x], [dys[m]], retain_graph=True)[0])",
            ),
            (
                "            _, y = graphs.pop(m)\n"
                "            grads = torch.autograd.grad(y, parameters, due.pop(m))\n",
                "            grads = due.pop(m)()\n",
            ),
        ],
    },
}
