"""The contrastive loss of two towers: gradients of one process with the negatives of all ranks, and its traffic."""

import pytest
import torch
from runs import A1, counted, draw, launch, leaf
from torch.nn.functional import cross_entropy, normalize

from dualpipe_lab.models.clip import ClipConfig, clip_layers, clip_stages
from dualpipe_lab.models.contrastive import contrastive_loss


def features(num_ranks, pairs=3, width=5):
    drawn = draw(7, 2, num_ranks * pairs, width)
    return normalize(drawn[0], dim=-1), normalize(drawn[1], dim=-1)


def test_the_loss_of_two_ranks_is_that_of_all_pairs_and_its_traffic_is_counted():
    images, texts = features(2)

    def fn(rank, world_size):
        rows = slice(3 * rank, 3 * rank + 3)
        image, text, scale = leaf(images[rows]), leaf(texts[rows]), leaf(torch.tensor(3.0).double())
        group = torch.distributed.group.WORLD

        losses = []

        def both():
            losses.append(contrastive_loss(image, text, scale, group))
            losses[0].backward()

        return counted(both), image.grad, text.grad, scale.grad, losses[0].detach()

    image, text, scale = leaf(images), leaf(texts), leaf(torch.tensor(3.0).double())
    logits, own = scale * image @ text.t(), torch.arange(6)
    loss = cross_entropy(logits, own) + cross_entropy(logits.t(), own)
    loss.backward()  # twice the mean, as is the sum over two ranks
    out = launch(fn, 2)
    for rank, (sent, d_image, d_text, _, _) in enumerate(out):
        rows = slice(3 * rank, 3 * rank + 3)
        assert (d_image - image.grad[rows]).abs().max() <= A1
        assert (d_text - text.grad[rows]).abs().max() <= A1
        assert sum(bytes_sent for _, bytes_sent in sent.values()) == 2 * 3 * 10 * 8  # a gather, a reduce-scatter
    assert abs(sum(one[3] for one in out) - scale.grad) <= A1
    assert abs(sum(one[4] for one in out) - loss.detach()) <= A1


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
