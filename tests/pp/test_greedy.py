"""Greedy generation through a pipeline writes what one process writes."""

import pytest
import torch
from runs import counted, launch
from torch import nn

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime import PipelineRuntime, greedy

VOCABULARY, WIDTH, M, ROWS, TOKENS = 11, 8, 4, 2, 5
NAMES = ("1f1b", "interleaved", "zero_bubble_h1", "dualpipe", "zbv")


class Reader(nn.Module):
    """A stage that mixes each token with those before it; ids at the first stage, logits at the last."""

    def __init__(self, stage, num_stages):
        super().__init__()
        torch.manual_seed(stage)
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else nn.Identity()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY) if stage == num_stages - 1 else nn.Identity()
        self.double()

    def forward(self, x):
        x = self.embed(x)
        return self.head(x + 3 * self.mix(x.cumsum(1)).sin())


def prompts(dtype=torch.int64):
    """Prompts of other lengths in each microbatch."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (ROWS, 2 + m), generator=generator).to(dtype) for m in range(M)]


def one_process(num_stages):
    model = nn.Sequential(*(Reader(stage, num_stages) for stage in range(num_stages)))
    texts = prompts()
    for _ in range(TOKENS):
        texts = [torch.cat([text, model(text)[:, -1:].argmax(-1)], 1) for text in texts]
    return texts


def test_a_pipeline_writes_what_one_process_writes():
    def fn(rank, world_size):
        torch.manual_seed(rank)
        results = []
        for name in NAMES:
            program = schedules.build(name, 2, M)
            mine = {a.stage: Reader(a.stage, program.num_stages) for a in program.actions(rank)}
            runtime = PipelineRuntime(program, mine, nn.functional.mse_loss)
            # a rank without the first stage reads no prompt
            known = [
                text if program.rank_of(0, m) == rank else torch.zeros_like(text) for m, text in enumerate(prompts())
            ]
            results.append(greedy(runtime, known, TOKENS))
        return results

    out = launch(fn, 2, timeout=400)
    for name, *found in zip(NAMES, *out, strict=True):
        program = schedules.build(name, 2, M)
        expected = one_process(program.num_stages)
        assert len({tuple(text.flatten().tolist()[-3:]) for text in expected}) > 1  # not one token forever
        for rank, texts in enumerate(found):
            assert texts.keys() == {m for m in range(M) if program.rank_of(0, m) == rank}, name
            assert all(torch.equal(text, expected[m]) for m, text in texts.items()), name


def test_tokens_go_back_as_one_message_per_microbatch_and_round():
    def fn(rank, world_size):
        program = schedules.gpipe(2, M)
        runtime = PipelineRuntime(program, {rank: Reader(rank, 2)}, nn.functional.mse_loss)
        return counted(lambda: greedy(runtime, prompts(), TOKENS)), greedy(runtime, prompts(), 0)

    (_, first), (sent, last) = launch(fn, 2)
    assert sum(size for _, size in sent.values()) == TOKENS * M * ROWS * 8
    assert list(first) == list(range(M))
    assert all(torch.equal(first[m], text) for m, text in enumerate(prompts()))
    assert last == {}


@pytest.mark.parametrize(
    ("prompt", "num_tokens"),
    [(prompts(), -1), (prompts(torch.int32), 1), ([torch.zeros(3).long()] * M, 1), ([torch.zeros(2, 0).long()], 1)],
)
def test_what_is_no_prompt_is_refused(prompt, num_tokens):
    with pytest.raises(ValueError, match="greedy adds at least 0 tokens to int64 prompts"):
        greedy(None, prompt, num_tokens)
