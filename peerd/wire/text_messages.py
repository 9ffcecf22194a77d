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
    """For the last stage: how to choose the tokens that follow."""
    num_drafted: int = 0
    """So many of the last tokens are guesses. The last stage tells what follows each of them, and what follows the token before them."""

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
    chosen: tuple[int, ...] = ()
    """From the last stage, the token that follows the last one that was no guess, and those that follow the guesses."""
    known: int | None = None
    """The peer holds so many tokens of this text, and cannot go on from where the pass begins: it has computed nothing."""
    waited_s: float = 0.0
    """For how long the pass waited for its turn, once its tensors had come, as the peer says."""
    computed_s: float = 0.0
