"""A small residual network on generated images: the example of a model made of named blocks.

It follows He et al. (arXiv 1512.03385) for small images, with GroupNorm: batch statistics would make a sample's gradient depend on the
other samples of its microbatch, and running averages would be state beside the parameters. Images are noise around one pattern per label.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from peerd.models.blocks import BlockModel
from peerd.models.weights import generator_of

NUM_LABELS = 10
IMAGE_SHAPE = (3, 16, 16)
WIDTHS = (16, 32, 64)
BLOCKS_PER_WIDTH = 2
GROUPS = 4
NOISE = 0.5
"""Standard deviation of the noise; the patterns have 1."""


class Stem(nn.Module):
    """Images [N, 3, 16, 16] -> [N, 16, 16, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(IMAGE_SHAPE[0], WIDTHS[0], 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(GROUPS, WIDTHS[0])

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.norm(self.convolution(images)))


class ResidualBlock(nn.Module):
    """[N, given, H, W] -> [N, width, H / stride, W / stride]."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, width, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(GROUPS, width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(GROUPS, width)
        self.shortcut = nn.Identity() if (given, stride) == (width, 1) else nn.Conv2d(given, width, 1, stride=stride, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(hidden)))
        return functional.relu(self.second_norm(self.second(inner)) + self.shortcut(hidden))


class Head(nn.Module):
    """[N, 64, 4, 4] -> scores of the labels [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTHS[-1], NUM_LABELS)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.scores(hidden.mean(dim=(2, 3)))
        return scores


def resnet() -> BlockModel:
    """The entry point."""
    blocks: dict[str, Callable[[], nn.Module]] = {"stem": partial(Stem)}
    given = WIDTHS[0]
    for group, width in enumerate(WIDTHS):
        for number in range(BLOCKS_PER_WIDTH):
            stride = 2 if group and not number else 1
            blocks[f"group{group + 1}_{number + 1}"] = partial(ResidualBlock, given, width, stride)
            given = width
    blocks["head"] = partial(Head)
    return BlockModel(blocks=blocks, input_shape=IMAGE_SHAPE, num_labels=NUM_LABELS, loss=functional.cross_entropy, samples=samples)


def samples(seed: int, step: int, index: int, count: int) -> tuple[Tensor, Tensor]:
    """Images float32 [count, 3, 16, 16] and labels int64 [count] of microbatch (step, index); uniform draws are equal on all peers."""
    generator = generator_of(seed, f"images/{step}/{index}")
    labels = torch.randint(0, NUM_LABELS, (count,), generator=generator)
    noise = _uniform((count, *IMAGE_SHAPE), generator) * NOISE
    return patterns(seed)[labels] + noise, labels


def patterns(seed: int) -> Tensor:
    """The pattern of each label's images: four squares, each of one colour, [10, 3, 16, 16]."""
    colours = _uniform((NUM_LABELS, IMAGE_SHAPE[0], 2, 2), generator_of(seed, "patterns"))
    return colours.repeat_interleave(IMAGE_SHAPE[1] // 2, dim=2).repeat_interleave(IMAGE_SHAPE[2] // 2, dim=3)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform draws of mean 0 and standard deviation 1."""
    return torch.rand(shape, generator=generator).mul_(2).sub_(1).mul_(3**0.5)
