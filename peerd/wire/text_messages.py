"""The call with which a peer asks one of another stage to go on with a text, and its answer."""

from __future__ import annotations

from dataclasses import dataclass

from peerd.policy.inference.sampling import Sampling
from peerd.wire.messages import TensorBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """The next tokens of a text, for one stage."""

    text: bytes
    """The number of the text, 16 bytes, which its asker chose."""
    stage: int
    step: int
    begin: int
    """How many tokens come before."""
    inputs: TensorBytes
    """int32 tokens [1, S] for the first stage, else float32 [1, S, W]; without a lossy codec."""
    tokens: TensorBytes | None = None
    """int32 [1, S], for stages after the first of a model that tells tokens to all stages."""
    sampling: Sampling | None = None
    """For the last stage: how to choose the token that follows."""

    @property
    def tensors(self) -> tuple[TensorBytes, ...]:
        return (self.inputs,) if self.tokens is None else (self.inputs, self.tokens)

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(each.num_bytes for each in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended:
    """What a peer answers; exactly one of these."""

    outputs: TensorBytes | None = None
    """The activations for the next stage, float32 [1, S, W]."""
    token: int | None = None
    """From the last stage, the token that follows."""
    known: int | None = None
    """The peer holds so many tokens of this text, and not as many as come before: it has computed nothing."""
