"""Which token comes next. It is a pure function of the logits, the request and the position: a peer that takes over chooses the same."""

from __future__ import annotations

import torch
from torch import Tensor

from peerd.policy.inference.sampling import Sampling, uniform


def choose(logits: Tensor, sampling: Sampling, position: int) -> int:
    """The token at `position` of the text, whose first token has position 0. logits: [vocabulary], in the machine's memory."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    chances, tokens = (logits.double() / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
    summed = chances.cumsum(-1)
    if sampling.top_p < 1:
        num_kept = int(torch.searchsorted(summed, sampling.top_p)) + 1  # that which reaches the share is kept, too
        summed = summed[:num_kept]
    drawn = torch.searchsorted(summed, uniform(sampling.seed, position) * summed[-1], right=True)
    return int(tokens[min(int(drawn), len(summed) - 1)])
