"""CLIP through a pipeline: gradients of one process with the negatives of all data ranks, and what crosses."""

import clip_runs
import pytest
import torch
from runs import A1, counted, draw, launch, leaf
from torch.nn.functional import normalize

from dualpipe_lab.models.clip import ClipConfig, clip_layers, clip_stages
from dualpipe_lab.models.contrastive import contrastive_loss

NAMES = ("1f1b", "dualpipe", "zbv")


def test_clip_on_four_ranks_has_the_gradients_of_one_process():
    """Ids ride along, and on the last schedule they are given to the text tower itself."""
    out, (grads, loss) = launch(clip_runs.run, 4, NAMES, timeout=400), clip_runs.one_process(2)
    for name in NAMES:
        seen = set()
        for ours, _ in (rank[name] for rank in out):
            seen |= ours.keys()
            for key, value in ours.items():
                assert (value - grads[key]).abs().max() <= A1 * max(1, grads[key].abs().max()), (name, key)
        assert seen == grads.keys(), name
        assert abs(sum(found for _, found in (rank[name] for rank in out)) - loss) <= A1 * loss, name


def features(num_ranks, pairs=3, width=5):
    drawn = draw(7, 2, num_ranks * pairs, width)
    return normalize(drawn[0], dim=-1), normalize(drawn[1], dim=-1)


def test_the_traffic_of_the_loss_is_counted():
    """A gather of features, and a reduce-scatter of their gradients."""
    images, texts = features(2)

    def fn(rank, world_size):
        image, text = (leaf(part[3 * rank : 3 * rank + 3]) for part in (images, texts))
        scale, group = leaf(torch.tensor(3.0).double()), torch.distributed.group.WORLD
        return counted(lambda: contrastive_loss(image, text, scale, group).backward())

    for sent in launch(fn, 2):
        assert sum(bytes_sent for _, bytes_sent in sent.values()) == 2 * 3 * 10 * 8


def test_the_backward_by_hand_passes_gradcheck():
    images, texts = features(1)
    inputs = leaf(images), leaf(texts), leaf(torch.tensor([2.0]).double())
    assert torch.autograd.gradcheck(contrastive_loss, inputs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: contrastive_loss(torch.ones(2, 3), torch.ones(2, 4), torch.ones(1)), "project both towers"),
        (lambda: ClipConfig(image_size=9), "patch_size divides image_size, got 4 and 9; use a multiple of 4"),
        (lambda: ClipConfig(text_hidden=13), "num_heads divides text_hidden, got 2 and 13"),
        (lambda: clip_stages(clip_layers(ClipConfig()), [4, 6]), r"share out 11 layers, at least 1 each, got \[4, 6\]"),
        (lambda: clip_stages(clip_layers(ClipConfig()), [11, 0]), r"at least 1 each, got \[11, 0\]"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
