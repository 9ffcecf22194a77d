"""Narrow boundaries between stages (SWARM appendix I): fewer bytes cross, and some quality is lost.

The sending stage ends with `Narrow`, the receiving stage begins with `Widen`. LayerNorm on both
sides keeps training from diverging. With "token-residual" both are projections alone, of what the layers have added to the token's row of a
fixed table: the stages know that row, so it crosses for nothing. Shapes: B sequences, S tokens, D d_model, C boundary_width.
"""

from __future__ import annotations

from torch import Tensor, nn

from peerd.config.manifest import ModelConfig


class Narrow(nn.Module):
    """LayerNorm, then a learned projection (bottleneck) or the maximum of `boundary_factor` neighbours (maxout, arXiv 1302.4389)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model)
        self.factor = config.boundary_factor
        self.projection = nn.Linear(config.d_model, config.boundary_width, bias=False) if config.boundary == "bottleneck" else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, C]."""
        normal: Tensor = self.norm(hidden)
        if self.projection is None:
            return normal.view(*normal.shape[:-1], -1, self.factor).amax(dim=-1)
        narrow: Tensor = self.projection(normal)
        return narrow


class Projection(nn.Module):
    """One end of a "token-residual" boundary. First both are the subspace's directions: what lies in these crosses as it is."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.projection = nn.Linear(num_in, num_out, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, C], or back."""
        projected: Tensor = self.projection(hidden)
        return projected.to(self.projection.weight.dtype)  # in lower precision, too, the stream is float32


def narrow_of(config: ModelConfig) -> nn.Module:
    return Projection(config.d_model, config.boundary_width) if config.boundary == "token-residual" else Narrow(config)


def widen_of(config: ModelConfig) -> nn.Module:
    return Projection(config.boundary_width, config.d_model) if config.boundary == "token-residual" else Widen(config)


class Widen(nn.Module):
    """LayerNorm and a learned projection back to the model's width."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.boundary_width)
        self.projection = nn.Linear(config.boundary_width, config.d_model, bias=False)

    def forward(self, narrow: Tensor) -> Tensor:
        """[B, S, C] -> [B, S, D]."""
        hidden: Tensor = self.projection(self.norm(narrow))
        return hidden
