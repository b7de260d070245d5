"""`greedy`: write tokens with the stages of a pipeline; forwards go down, each new token goes from the last stage back.

Chapter: book/pp/two-towers.  In: a prompt per microbatch.  Out: the prompts and what follows them.
  one round   a forward of every microbatch, then a message of one token per row from the last stage's rank to the
              first's; where both stages are on one rank (V-shapes) there is no message
  bytes       8 per token and row on the way back; activations of the whole text on the way down: no keys are kept
  busy        one text alone keeps one rank busy at a time; M microbatches of texts fill the pipeline
The last stage returns logits `[rows, length, vocabulary]`.
Elsewhere: Megatron `ForwardStep` broadcasts logits over the pipeline; vLLM sends sampled tokens to all ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.comm import P2P
from dualpipe_lab.pp.program import Action, F
from dualpipe_lab.pp.runtime.runtime import PipelineRuntime


def greedy(runtime: PipelineRuntime, prompts: Sequence[Tensor], num_tokens: int) -> dict[int, Tensor]:
    """Continue prompts by the likeliest tokens; all ranks of the pipeline call this.

    Args:
        runtime: of stages from token ids to logits; made without `boundary`, as a text grows with every token.  The
            modules keep their mode, training or evaluation.
        prompts: ids `[rows, length]` for each microbatch of the program; read on the ranks that hold the first stage.
        num_tokens: tokens to add to each row.

    Returns:
        By microbatch, ids `[rows, length + num_tokens]`, on the rank that holds its first stage.

    Raises:
        ValueError: for a number that has no meaning, prompts that are not ids, or as `PipelineRuntime.evaluate`.
    """
    if num_tokens < 0 or any(x.dim() != 2 or x.dtype != torch.int64 or not x.numel() for x in prompts):
        given = ", ".join(f"{tuple(x.shape)} of {x.dtype}" for x in prompts)
        raise ValueError(
            f"greedy adds at least 0 tokens to int64 prompts [rows, length], got num_tokens={num_tokens} and {given}"
        )
    texts, program = list(prompts), runtime.program
    enters = [program.rank_of(0, microbatch) == runtime.rank for microbatch in range(len(texts))]
    for _ in range(num_tokens):
        # the texts grow where they enter; elsewhere they stay as they were given
        logits = runtime.evaluate([text if here else None for text, here in zip(texts, enters, strict=True)]).outputs
        found = {microbatch: _likeliest(output) for microbatch, output in logits.items()}
        for microbatch, tokens in _bring_to_first_stage(runtime, found, texts).items():
            texts[microbatch] = torch.cat([texts[microbatch], tokens[:, None]], dim=1)
    return {microbatch: text for microbatch, text in enumerate(texts) if enters[microbatch]}


def _likeliest(logits: object) -> Tensor:
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise ValueError(
            f"greedy reads logits [rows, length, vocabulary], and the last stage returned {type(logits).__name__}"
            f"{tuple(getattr(logits, 'shape', ()))}; return the logits alone"
        )
    return logits[:, -1].argmax(-1)


def _bring_to_first_stage(
    runtime: PipelineRuntime, found: dict[int, Tensor], texts: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Send new tokens to the ranks of the first stage; return those of the texts that this rank holds."""
    program, p2p, last = runtime.program, runtime.p2p, runtime.program.num_stages - 1
    messages: list[P2P] = []
    arrived: dict[int, Tensor] = {}
    for microbatch, text in enumerate(texts):
        source, target = program.rank_of(last, microbatch), program.rank_of(0, microbatch)
        tag = p2p.result_tag(Action(last, F, microbatch), 0)  # the result of the last stage travels nowhere else
        if runtime.rank == source == target:
            arrived[microbatch] = found[microbatch]
        elif runtime.rank == source:
            messages.append(P2P("isend", found[microbatch], p2p.global_ranks[target], tag, f"token of {microbatch}"))
        elif runtime.rank == target:
            arrived[microbatch] = torch.empty(len(text), dtype=torch.int64, device=p2p.device)
            messages.append(P2P("irecv", arrived[microbatch], p2p.global_ranks[source], tag))
    for message in comm.batch_isend_irecv(messages, p2p.group):
        message.wait()
    return arrived
