"""A small CLIP, cut into stages: the layers of two towers one after another, in one chain of named tensors.

Chapter: book/pp/two-towers.  In: images and ids of b pairs.  Out: features of unit length and a scale.
The layers, in the order in which a microbatch meets them, and what crosses the boundary behind each of them:
  image embedding, image layers     x (b, 1 + patches, h), and the ids, which ride along
  image head                        image (b, d), and the ids
  text embedding, text layers       x (b, length, h), image, which rides along, and end (b)
  text head                         image, text and scale, which stay on the rank of the loss
Ids that are extra inputs of the stage with the text embedding (`extra={stage: [{"ids": ids}, ...]}`) cross no boundary.
Elsewhere: open_clip `CLIP`; Megatron's multimodal examples place each tower on ranks of its own.
Source: Radford et al. 2021 (arXiv 2103.00020), figure 3.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, normalize, scaled_dot_product_attention

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.models.contrastive import contrastive_loss

Payload: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class ClipConfig:
    """Sizes of a CLIP.

    Attributes:
        image_size: pixels of a side of the square images of one channel.
        patch_size: pixels of a side of a patch.
        image_hidden, image_layers: of the image tower.
        vocabulary_size, text_length: of the texts; the largest id marks a text's end.
        text_hidden, text_layers: of the text tower.
        num_heads: of attention, in both towers.
        width: of the features, in which the towers meet.

    Raises:
        ValueError: sizes that do not divide.
    """

    image_size: int = 8
    patch_size: int = 4
    image_hidden: int = 16
    image_layers: int = 4
    vocabulary_size: int = 17
    text_length: int = 6
    text_hidden: int = 12
    text_layers: int = 3
    num_heads: int = 2
    width: int = 8

    def __post_init__(self) -> None:
        """Check the sizes."""
        pairs = ("image_size", "patch_size"), ("image_hidden", "num_heads"), ("text_hidden", "num_heads")
        for what, by in pairs:
            size, divisor = getattr(self, what), getattr(self, by)
            if size < 1 or divisor < 1 or size % divisor:
                raise ValueError(f"{by} divides {what}, got {divisor} and {size}; use a multiple of {divisor}")

    @property
    def num_patches(self) -> int:
        """The patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class _Layer(nn.Module):
    """One transformer layer of a tower: norm, attention, norm, MLP; it changes `x` and passes on all else."""

    def __init__(self, hidden: int, num_heads: int, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, payload: Payload) -> Payload:
        x = payload["x"]
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1))  # b s 3 heads size
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return payload | {"x": x + self.down(gelu(self.up(self.norms[1](x))))}


class _ImageEmbedding(nn.Module):
    """Patches of an image become `x`, behind a first vector that will hold the image; the pixels end here."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.patches = nn.Linear(config.patch_size**2, config.image_hidden)
        self.first = nn.Parameter(torch.randn(1, config.image_hidden))
        self.places = nn.Parameter(0.1 * torch.randn(1 + config.num_patches, config.image_hidden))

    def forward(self, payload: Payload) -> Payload:
        pixels, size = payload.pop("pixels"), self.patch_size
        cells = pixels.unfold(1, size, size).unfold(2, size, size).flatten(3).flatten(1, 2)  # b patches size^2
        first = self.first.expand(len(pixels), 1, -1)
        return {"x": torch.cat([first, self.patches(cells)], dim=1) + self.places, **payload}


class _TextEmbedding(nn.Module):
    """Ids become `x`, and the position of each text's end becomes `end`; the ids end here."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary_size, config.text_hidden)
        self.places = nn.Parameter(0.1 * torch.randn(config.text_length, config.text_hidden))

    def forward(self, payload: Payload) -> Payload:
        ids = payload.pop("ids")
        return {"x": self.tokens(ids) + self.places, **payload, "end": ids.argmax(-1)}


class _Head(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(hidden), nn.Linear(hidden, width, bias=False)

    def unit(self, x: Tensor) -> Tensor:
        return normalize(self.project(self.norm(x)), dim=-1)


class _ImageHead(_Head):
    """The first vector of `x` becomes `image`, of unit length."""

    def forward(self, payload: Payload) -> Payload:
        return {"image": self.unit(payload.pop("x")[:, 0]), **payload}


class _TextHead(_Head):
    """The vector at each text's end becomes `text`, of unit length; here is the scale of the loss, too."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__(hidden, width)
        self.log_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, payload: Payload) -> Payload:
        x, end = payload.pop("x"), payload.pop("end")
        ends = x[torch.arange(len(x), device=x.device), end]
        return {**payload, "text": self.unit(ends), "scale": self.log_scale.exp()}


class ClipStage(nn.Module):
    """Consecutive layers of a CLIP, by their numbers in the full model: named tensors in, named tensors out."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): layer for number, layer in layers.items()})

    def forward(self, **payload: Tensor) -> Payload:
        """Run the layers; what they do not take is passed on."""
        for layer in self.layers.values():
            payload = layer(dict(payload))
        return payload


def clip_layers(config: ClipConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """Build the layers of both towers in the order of the chain; equal arguments give equal weights.

    >>> len(clip_layers(ClipConfig(image_layers=4, text_layers=3)))
    11
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [
            _ImageEmbedding(config),
            *(_Layer(config.image_hidden, config.num_heads, causal=False) for _ in range(config.image_layers)),
            _ImageHead(config.image_hidden, config.width),
            _TextEmbedding(config),
            *(_Layer(config.text_hidden, config.num_heads, causal=True) for _ in range(config.text_layers)),
            _TextHead(config.text_hidden, config.width),
        ]
    return [layer.to(dtype) for layer in layers]


def clip_stages(layers: Sequence[nn.Module], sizes: Sequence[int]) -> list[ClipStage]:
    """Cut a chain of layers into stages of these numbers of layers, such as `partition(costs, 4).sizes`.

    Raises:
        ValueError: sizes that do not add up to the layers, or an empty stage.
    """
    if sum(sizes) != len(layers) or min(sizes) < 1:
        raise ValueError(f"stages share out {len(layers)} layers, at least 1 each, got {list(sizes)}")
    cuts = pairwise(accumulate(sizes, initial=0))
    return [ClipStage({at: layers[at] for at in range(start, stop)}) for start, stop in cuts]


def clip_loss(group: Group | None = None) -> Callable[[Payload, Any], Tensor]:
    """Return the loss function of a pipeline: contrastive, with the negatives of all data ranks of `group`."""
    return lambda output, _: contrastive_loss(output["image"], output["text"], output["scale"], group)
