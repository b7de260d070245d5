"""`second_forward`, `second_backward`: the calls of what predicts a second token, on the last stage.

Chapter: book/whole/two-tokens.  In: a stage's calls, the number of the extra layer.  Out: calls, entered by the stage.
  forward    the embedding's sum; the gather of the projection's outputs; the extra layer; the head and its loss again
  backward   the same of gradients; under sequence parallelism the gather of tokens where the projection's were sliced
  recompute  everything between embedding (its copy included) and head once more; of overlapped experts the projection,
             without the gather behind it, from which nothing is saved, and what is before the exchanges
"""

from dualpipe_lab.plan.layer_traffic import StageTraffic


def second_forward(stage: StageTraffic, number: int) -> None:
    """Enter the forward of the extra part, whose layer has this number."""
    stage.sum_output()
    _projection(stage)
    _gather_features(stage)
    stage.layer_forward(number)
    stage.head_forward()


def second_backward(stage: StageTraffic, number: int, has_table: bool) -> None:
    """Enter its backward; `has_table`: the embedding is a copy, which the part itself looks up."""
    if stage.plan.recompute:
        if has_table:
            stage.sum_output()
        _projection(stage)
        if not stage.plan.overlap:
            _gather_features(stage)
        stage.layer_again(number)
    stage.head_backward()
    stage.layer_backward(number)
    if stage.plan.sequence_parallel:
        stage.gather_input()  # the gradient of the slice of tokens
    stage.sum_input_grad(2 * stage.config.hidden_size)
    for _ in range(2):
        stage.sum_norm()
    stage.gather_output_grad()


def _projection(stage: StageTraffic) -> None:
    stage.gather_input(2 * stage.config.hidden_size)


def _gather_features(stage: StageTraffic) -> None:
    stage.calls.all_gather(stage.tp, stage.num_tokens * stage.config.hidden_size // stage.plan.tp, stage.element)
