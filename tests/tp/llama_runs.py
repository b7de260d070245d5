"""What the tests of the Llama share: sizes that do not divide, a batch, and the same in plain torch."""

import torch

from dualpipe_lab.models.plain_llama import PlainLlama

BATCH, TOKENS = 2, 12
SIZES = {"vocabulary_size": 37, "hidden_size": 24, "ffn_size": 30, "num_layers": 2}


def batch(vocabulary, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(0, vocabulary, (2, BATCH, TOKENS), generator=generator)
    targets[0, :5] = -100
    return ids, targets


def plain(config, state, ids, targets, dtype=torch.float64):
    model = PlainLlama(config, dtype)
    model.load_state_dict(state | {"head.weight": state["embedding.weight"]} if config.tied else state)
    loss = model.loss(ids, targets)
    loss.backward()
    return {"loss": loss.detach()} | {name: value.grad for name, value in model.named_parameters()}
