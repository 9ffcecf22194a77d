"""A trainer-mediated pipeline on hivemind.moe as published: one server per stage, and a trainer through which every tensor passes.

A server recomputes the forward pass in the backward pass. Published servers update their expert after every backward pass; here they
update after a step's last one, with the mean of its gradients, so that the losses can be compared. hivemind forks processes, which
gRPC does not survive: peerd's wire must not be imported here.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hivemind
import torch
from hivemind.moe import ModuleBackend, RemoteExpert, Server
from hivemind.moe.client.expert import create_remote_experts
from hivemind.moe.server.dht_handler import get_experts
from hivemind.utils.tensor_descr import BatchTensorDescriptor
from torch import Tensor, nn
from torch.nn import functional

from peerd.config.manifest import Manifest
from peerd.models.stages import StageModule, build_stage
from peerd.stage.executor import BACKWARD_SHARE, FORWARD_SHARE, Pace
from peerd.stage.optimizer import Optimizer
from peerd.train.corpus import Corpus

IN_FLIGHT = 8
"""Microbatches that the trainer has in flight; more are not faster here."""
HANDLERS = 4
"""Processes of a server that take calls, as hivemind recommends."""
POLL_S = 0.2


class Expert(nn.Module):
    """A peerd stage as a server hosts it. The last stage returns the loss of each sequence."""

    def __init__(self, module: StageModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        output: Tensor = self.module(inputs)
        if labels is None:
            return output
        return functional.cross_entropy(output.transpose(1, 2), labels, reduction="none").mean(dim=1)


class Backend(ModuleBackend):  # type: ignore[misc]
    """Updates once per step, and takes as long for a pass as a peer with the same stand-in."""

    def __init__(self, manifest: Manifest, expert: Expert, pace: Pace, **schemas: object) -> None:
        super().__init__("stage", expert, **schemas)
        self._train = manifest.train
        self._pace = pace
        self._parameters = dict(expert.module.named_parameters())
        self._optimizer = Optimizer(manifest, self._parameters)
        self._sequences = self._step = 0

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self._held(super().forward, FORWARD_SHARE, inputs)

    def backward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self._held(super().backward, BACKWARD_SHARE, inputs)

    def _held(self, passes: Callable[..., tuple[Tensor, ...]], share: float, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute microbatches that arrived together as one; this takes as long as all of them."""
        began_s = time.monotonic()
        outputs = passes(*inputs)
        self._pace.hold(began_s, share * len(inputs[0]) / self._train.microbatch_size)
        return outputs

    def on_backward(self, batch_size: int) -> None:
        self._sequences += batch_size
        if self._sequences < self._train.microbatches_per_step * self._train.microbatch_size:
            return
        sums = {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}
        self._optimizer.update(self._step, {name: total / self._train.microbatches_per_step for name, total in sums.items()})
        self.module.zero_grad()
        self._sequences, self._step = 0, self._step + 1


def serve(manifest: Manifest, stage: int, folder: Path, pace: Pace, host: str) -> None:
    """Host one stage on an address of this machine until the process is killed."""
    train, module = manifest.train, build_stage(manifest, stage, "cpu")
    tokens = BatchTensorDescriptor.from_tensor(torch.zeros(3, train.sequence_length, dtype=torch.int64))
    hidden = BatchTensorDescriptor.from_tensor(torch.zeros(3, train.sequence_length, manifest.decoder.d_model))
    arguments = (tokens if module.is_first else hidden, *([tokens] if module.is_last else []))
    dht = hivemind.DHT(start=True, host_maddrs=[_listening(host)])
    backend = Backend(manifest, Expert(module), pace, args_schema=arguments, max_batch_size=4096)
    server = Server(dht, {f"stage.{stage}": backend}, num_connection_handlers=HANDLERS, device="cpu")
    _write(folder / f"server-{stage}", json.dumps([str(address) for address in dht.get_visible_maddrs()]))
    server.run()


def steps_of_trainer(manifest: Manifest, corpus: Corpus, folder: Path, host: str) -> Iterator[float]:
    """Yields each step's loss. All activations and gradients pass through this process."""
    train = manifest.train
    stages = _find_stages(train.num_stages, folder, host)

    def microbatch(step: int, index: int) -> float:
        tokens, labels = corpus.microbatch(step, index)
        output = tokens.long()
        for stage in stages[:-1]:
            output = stage(output)
        loss: Tensor = stages[-1](output, labels.long()).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for step in itertools.count():
            losses = pool.map(microbatch, itertools.repeat(step), range(train.microbatches_per_step))
            yield sum(losses) / train.microbatches_per_step


def _find_stages(num_stages: int, folder: Path, host: str) -> list[RemoteExpert]:
    addresses = [address for stage in range(num_stages) for address in json.loads(_read(folder / f"server-{stage}"))]
    dht = hivemind.DHT(initial_peers=addresses, start=True, host_maddrs=[_listening(host)])
    while True:
        found = get_experts(dht, [f"stage.{stage}" for stage in range(num_stages)])
        if all(info is not None for info in found):
            return list(create_remote_experts(found, dht))
        time.sleep(POLL_S)


def _listening(host: str) -> str:
    return f"/ip4/{host}/tcp/0"


def _write(file: Path, text: str) -> None:
    """Write the file atomically."""
    file.with_suffix(".new").write_text(text, encoding="utf-8")
    file.with_suffix(".new").rename(file)


def _read(file: Path) -> str:
    while not file.exists():
        time.sleep(POLL_S)
    return file.read_text(encoding="utf-8")
