"""How large a stage's state can be as it travels: a download that claims more is refused before its first chunk."""

from __future__ import annotations

import functools

import torch

from peerd.config.manifest import Manifest
from peerd.models.stages import initial_parameter_spec, tied_spec
from peerd.policy.step.norms import TOLD_STEPS
from peerd.stage.holdings import MAX_CHAIN_BYTES
from peerd.stage.optimizer import optimizer_spec
from peerd.stage.precision import LossScale
from peerd.wire.tensors import file_bytes

_LATEST_STEP = 10**18 - 1


@functools.lru_cache(maxsize=256)
def most_state_bytes(manifest: Manifest, stage: int, tied_only: bool = False) -> int:
    """Bytes of the files with everything that `Holdings.tensors` may give; if `tied_only`, with a tied weight's copy alone."""
    parameters = tied_spec(manifest, stage) if tied_only else initial_parameter_spec(manifest, stage)
    kinds = ("parameters", "previous", *(["ahead"] if manifest.train.delayed_updates else []))
    shapes = {f"{kind}/{name}": shape for kind in kinds for name, shape in parameters.items()}
    shapes |= {"tied/inexact": (), "tied/chain": (MAX_CHAIN_BYTES,)}
    if not tied_only:
        shapes |= {f"norms/{_LATEST_STEP - back}": () for back in range(TOLD_STEPS)}
        shapes |= dict.fromkeys((f"loss_scale/{name}" for name in LossScale.first(manifest.train).tensors()), ())
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    tensors |= {f"optimizer/{name}": value for name, value in optimizer_spec(manifest.train, parameters).items()}
    if tied_only:
        return file_bytes(tensors)
    previous = {name: value for name, value in tensors.items() if name.startswith("previous/")}
    return file_bytes({name: value for name, value in tensors.items() if name not in previous}) + file_bytes(previous)
