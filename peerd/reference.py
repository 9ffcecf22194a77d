"""Trains a run in one process. A swarm of any shape must arrive at the same result.

It trains as the peers do, stage by stage and microbatch by microbatch, without a network.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peerd.config import manifest as manifest_files
from peerd.config.atomic import draft
from peerd.config.codec import parse_allowed, parse_averaged
from peerd.config.manifest import Manifest, TrainConfig, WireConfig
from peerd.config.paths import cache_folder
from peerd.data.progress import TerminalBar, silent
from peerd.data.tokens import prepare_tokens
from peerd.errors import DivergedError, NotFiniteError, UsageError
from peerd.models.dropout import dropout_of
from peerd.models.stages import StageModule, build_stage
from peerd.policy.step.diverged import DIVERGED_REMEDY
from peerd.policy.step.norms import combine
from peerd.replay import Move, Replay, read_logs
from peerd.replicas import Backpropagate, Replicas
from peerd.stage.accumulator import gradient_norm, usable
from peerd.stage.export import write_evaluations, write_export
from peerd.stage.history import HistoryEntry, entry_after
from peerd.stage.optimizer import Optimizer, check_no_decay
from peerd.stage.parameters import copy_parameters
from peerd.stage.precision import SMALLEST_LOSS_SCALE, LossScale, run_module, set_products
from peerd.stage.snapshots import Downloaded
from peerd.stage.start import StartState
from peerd.stage.update import apply_sums
from peerd.table.record import Evaluation
from peerd.train.corpus import Corpus, agree_on_data
from peerd.train.samples import Microbatches, Samples
from peerd.wire.codecs import through

MAX_REPLICAS = 1024
_PLAIN_TRAIN, _PLAIN_WIRE = TrainConfig(), WireConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRequest:
    """The request of the command."""

    run_file: str
    steps: int
    out: str
    data: str = ""
    """Text file or folder that replaces the run's data.source."""
    replicas: int = 1
    """Copies of each stage, where steps are local."""
    replay: str = ""
    """Folder with the logs of what peers have done in local steps, to play that."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"--steps is {self.steps}", "ask for at least 1")
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise UsageError(f"--replicas is {self.replicas}", f"ask for 1 to {MAX_REPLICAS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    parameters: dict[str, Tensor]
    """The whole model's parameters by name."""
    optimizer_state: dict[str, Tensor]
    """The tensors of `stage.optimizer.Optimizer.tensors`."""
    history: list[HistoryEntry]
    norms: list[float]
    """The whole model's gradient norm of each step, if the run clips or computes in float16."""
    evaluations: list[Evaluation]


def train_reference(
    manifest: Manifest,
    corpus: Microbatches,
    steps: int,
    report: Callable[[HistoryEntry], None] | None = None,
    start: StartState | None = None,
    num_replicas: int = 1,
) -> ReferenceResult:
    """Train on the CPU up to step `steps`, counting the steps before `start`; `report` is called after each step.

    Training begins with first weights, or with `start`. Sets torch's thread count for the whole process if compute.threads says one.
    Where steps are local, each stage is trained in so many copies.
    """
    _set_up(manifest)
    stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]
    ahead = copy.deepcopy(stages) if manifest.train.delayed_updates else stages
    optimizers = [Optimizer(manifest, dict(stage.named_parameters())) for stage in ahead]
    copies = Replicas(manifest, stages, num_replicas) if manifest.train.local_batch else None
    history: list[HistoryEntry] = []
    train, norms, evaluations = manifest.train, list[float](), list[Evaluation]()
    scale = LossScale.first(train) if train.precision == "float16" else LossScale(1.0, 1.0)
    if start is not None:
        for stage, optimizer in zip(stages, optimizers, strict=True):
            history = _load(stage, optimizer, start.of_stage(manifest, stage.stage))
        for stage, newest in zip(stages, ahead, strict=True):
            copy_parameters(stage, newest)
    for step in range(start.step if start else 0, steps):
        if train.evaluates_at(step):
            evaluations.append(evaluate(manifest, corpus, stages, step))
        try:
            if copies is not None and train.is_local_at(step):
                if step == train.local_steps_after > 0:
                    copies.begin_from(optimizers)
                loss, gradients = copies.mean_changes(step, backward_of(manifest, corpus, step))
            else:
                loss, gradients = mean_gradients(manifest, corpus, stages, step, scale.value)
        except NotFiniteError as error:
            raise DivergedError(f"diverged at step {step}: {error.message}", DIVERGED_REMEDY) from None
        if train.delayed_updates:  # the next step is computed with the parameters before this update
            for stage, newest in zip(stages, ahead, strict=True):
                copy_parameters(newest, stage)
        norm = _whole_norm(stages, gradients) if train.shares_norms else None
        for optimizer, of_stage in zip(optimizers, gradients, strict=True):
            apply_sums(train, optimizer, step, of_stage, 1, norm)
        if norm is not None:
            norms.append(norm)
            scale = scale.after(norm, train)
        history.append(entry_after(history, step, loss, manifest.tokens_per_step_at(step)))
        if report is not None:
            report(history[-1])
    if train.evaluates_at(steps):
        evaluations.append(evaluate(manifest, corpus, stages, steps))
    parameters = {name: parameter.detach() for stage in ahead for name, parameter in stage.named_parameters()}
    state = {name: tensor for optimizer in optimizers for name, tensor in optimizer.tensors().items()}
    return ReferenceResult(parameters=parameters, optimizer_state=state, history=history, norms=norms, evaluations=evaluations)


def replay_reference(
    manifest: Manifest,
    corpus: Microbatches,
    steps: int,
    logs: Sequence[Sequence[Move]],
    report: Callable[[HistoryEntry], None] | None = None,
    start: StartState | None = None,
) -> ReferenceResult:
    """Compute again what peers have done in local steps up to step `steps`, from the logs of their moves. Raises UsageError."""
    if not manifest.train.local_batch:
        raise UsageError("--replay is given, and the run has no local steps", "leave it out: without them a run is the same on all paths")
    if parse_averaged(manifest.wire.weight_gradients).is_lossy:
        raise UsageError("--replay cannot play lossy averages", 'it needs a run with wire.weight_gradients "none"')
    _set_up(manifest)
    replay, evaluations = Replay(manifest, logs, partial(backward_of, manifest, corpus), steps), list[Evaluation]()
    if start is not None:
        for stage, optimizer in zip(replay.stages, replay.outer, strict=True):
            replay.history = _load(stage, optimizer, start.of_stage(manifest, stage.stage))
    for step in range(replay.step, steps):
        if manifest.train.evaluates_at(step):
            evaluations.append(evaluate(manifest, corpus, replay.stages, step))
        replay.play_step()
        if report is not None:
            report(replay.history[-1])
    if manifest.train.evaluates_at(steps):
        evaluations.append(evaluate(manifest, corpus, replay.stages, steps))
    parameters = {name: parameter.detach() for stage in replay.stages for name, parameter in stage.named_parameters()}
    state = {name: tensor for optimizer in replay.outer for name, tensor in optimizer.tensors().items()}
    return ReferenceResult(parameters=parameters, optimizer_state=state, history=replay.history, norms=[], evaluations=evaluations)


def _set_up(manifest: Manifest) -> None:
    if manifest.compute.threads:
        torch.set_num_threads(manifest.compute.threads)
    set_products(manifest.train)


def evaluate(manifest: Manifest, corpus: Microbatches, stages: Sequence[StageModule], step: int) -> Evaluation:
    """The mean loss over the evaluation microbatches, as the swarm computes it at `step`."""
    forth, losses = parse_allowed(manifest.wire.activations).most_exact, []
    for index in range(manifest.train.evaluation_microbatches):
        hidden, labels = corpus.evaluation_microbatch(index)
        with torch.no_grad():
            for stage in stages:
                inputs = hidden if stage.is_first else through(forth, hidden)
                hidden = run_module(manifest.train, stage, inputs, labels if stage.needs_labels else None)
        losses.append(float(hidden))
    return Evaluation(step, math.fsum(losses) / len(losses))


def _load(stage: StageModule, optimizer: Optimizer, state: Downloaded) -> list[HistoryEntry]:
    """Set a stage and its optimizer; returns the history behind them."""
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter.copy_(state.tensors[f"parameters/{name}"])
    moments = {name: value for name, value in state.tensors.items() if name.startswith("optimizer/")}
    optimizer.load({name.removeprefix("optimizer/"): value for name, value in moments.items()})
    return list(state.history)


def mean_gradients(
    manifest: Manifest, corpus: Microbatches, stages: Sequence[StageModule], step: int, scale: float = 1.0
) -> tuple[float, list[dict[str, Tensor]]]:
    """Mean loss and, per stage, mean gradients over the step's microbatches, in train.accumulate precision.

    Where a lower scale may help, a microbatch that overflows makes its stage's gradients infinite, and its loss is left out of the mean
    (NaN: no loss is finite). Otherwise it raises NotFiniteError.

    Both copies of a tied weight get the sum of the first and the last stage's gradients.
    With a loss scale (a power of two) every stage scales the gradient that it receives and unscales the one that it returns.
    """
    num_microbatches = manifest.train.microbatches_per_step
    precision = torch.float64 if manifest.train.accumulate == "float64" else torch.float32
    sums = [{name: torch.zeros_like(value, dtype=precision) for name, value in stage.named_parameters()} for stage in stages]
    loss_sum, with_loss, work = 0.0, 0, backward_of(manifest, corpus, step, scale)
    for index in range(num_microbatches):
        loss = work(stages, index)
        if math.isfinite(loss):
            loss_sum, with_loss = loss_sum + loss, with_loss + 1
        for stage, of_stage in zip(stages, sums, strict=True):
            _collect_gradients(stage, of_stage, scale, manifest.train)
    for name in stages[0].tied_names:
        total = sums[0][name] + sums[-1][name]
        sums[0][name], sums[-1][name] = total, total.clone()
    for of_stage in sums:
        for value in of_stage.values():
            value.div_(num_microbatches)
    return loss_sum / with_loss if with_loss else math.nan, sums


def backward_of(manifest: Manifest, corpus: Microbatches, step: int, scale: float = 1.0) -> Backpropagate:
    """What computes a microbatch of this step, with the run's dropout."""

    def work(stages: Sequence[StageModule], index: int) -> float:
        tokens, labels = corpus.microbatch(step, index)
        with contextlib.ExitStack() as dropouts:
            for stage in stages:
                dropouts.enter_context(dropout_of(stage, manifest, step, index))
            return backpropagate(stages, tokens, labels, manifest.wire, manifest.train, scale)

    return work


def _whole_norm(stages: Sequence[StageModule], gradients: Sequence[dict[str, Tensor]]) -> float:
    """The whole model's gradient norm; a tied weight counts once, in the first stage."""
    counted = [
        [value for name, value in of_stage.items() if stage.is_first or name not in stage.tied_names]
        for stage, of_stage in zip(stages, gradients, strict=True)
    ]
    return combine([gradient_norm(of_stage) for of_stage in counted])


def backpropagate(
    stages: Sequence[StageModule],
    tokens: Tensor,
    labels: Tensor,
    wire: WireConfig = _PLAIN_WIRE,
    train: TrainConfig = _PLAIN_TRAIN,
    scale: float = 1.0,
) -> float:
    """Compute one microbatch forward and backward, which leaves gradients times `scale` on the parameters. Returns its loss.

    The stages are not joined into one graph: activations and gradients pass the wire's codecs at each boundary, as between peers.
    If the run leaves the codec to each link (`auto`), they pass unchanged.
    """
    forth, back = (parse_allowed(name).most_exact for name in (wire.activations, wire.activation_gradients))
    inputs, outputs = [tokens], []
    for stage in stages:
        outputs.append(run_module(train, stage, inputs[-1], labels if stage.needs_labels else None))
        _is_usable(train, scale, outputs[-1:])
        inputs.append(through(forth, outputs[-1].detach()).requires_grad_())
    gradient = torch.ones_like(outputs[-1])
    for received, output in zip(reversed(inputs[:-1]), reversed(outputs), strict=True):
        torch.autograd.backward(output, gradient if scale == 1 else gradient * scale)
        if received.grad is not None:
            _is_usable(train, scale, [received.grad])
            gradient = through(back, received.grad if scale == 1 else received.grad / scale)
    return float(outputs[-1].detach())


def _collect_gradients(stage: StageModule, sums: dict[str, Tensor], scale: float, train: TrainConfig) -> None:
    found = {name: parameter.grad for name, parameter in stage.named_parameters() if parameter.grad is not None}
    gradients = {name: value if scale == 1 else value / scale for name, value in found.items()}
    is_usable = _is_usable(train, scale, gradients.values())
    for name, total in sums.items():
        total.add_(gradients[name] if is_usable else math.inf)
    stage.zero_grad()


def _is_usable(train: TrainConfig, scale: float, values: Iterable[Tensor]) -> bool:
    """Whether no value has overflowed. NotFiniteError if one has and no lower loss scale may help."""
    found = usable(values)
    if not found and (train.precision != "float16" or scale <= SMALLEST_LOSS_SCALE):
        raise NotFiniteError("the loss, or a gradient, is not finite")
    return found


def run(request: ReferenceRequest) -> dict[str, Any]:
    """The whole command: read, train, write. Returns the fields to print."""
    manifest, corpus, start = _open_run(request)
    if request.replicas > 1 and not manifest.train.local_batch:
        raise UsageError(f"--replicas is {request.replicas}, and the run has no local steps", "set train.local_batch, or leave it out")
    logs = read_logs(Path(request.replay)) if request.replay else None
    if logs == []:
        raise UsageError(f"no log of a peer's moves lies in {request.replay}", "give the folder of `--moves`")
    with draft(Path(request.out)) as path:
        path.touch()  # find out before the training if the output folder cannot be written
    began = time.monotonic()
    if logs is not None:
        result = replay_reference(manifest, corpus, request.steps, logs, _print_progress, start)
    else:
        result = train_reference(manifest, corpus, request.steps, _print_progress, start, request.replicas)
    elapsed_s = time.monotonic() - began
    write_export(Path(request.out), manifest, result.parameters, result.optimizer_state, result.history)
    write_evaluations(Path(request.out), result.evaluations)
    return {
        "steps": len(result.history),
        "loss_first": result.history[0].loss,
        "loss_last": result.history[-1].loss,
        "tokens_per_second": round(sum(entry.tokens for entry in result.history[manifest.start.step :]) / elapsed_s, 1),
    }


def _open_run(request: ReferenceRequest) -> tuple[Manifest, Microbatches, StartState | None]:
    """The manifest with its data and start filled in, its microbatches, and its start. Relative paths are relative to the run file."""
    manifest = manifest_files.load(Path(request.run_file))
    check_no_decay(manifest)
    folder = Path(request.run_file).absolute().parent
    agreed, corpus = _open_data(manifest, request.data, folder)
    if not manifest.start.state:
        return agreed, corpus, None
    path = (folder / Path(manifest.start.state).expanduser()).absolute()
    start = StartState(path)
    agreed = start.agree(dataclasses.replace(agreed, start=dataclasses.replace(agreed.start, state=str(path))))
    if request.steps <= start.step:
        raise UsageError(f"--steps is {request.steps}, and the run starts from step {start.step}", "ask for more")
    return agreed, corpus, start


def _open_data(manifest: Manifest, given: str, folder: Path) -> tuple[Manifest, Microbatches]:
    """The manifest with its data filled in, and its microbatches."""
    if manifest.model.makes_samples:
        return manifest, Samples(manifest)
    bar, data = TerminalBar(), manifest.data.located(folder)
    data = dataclasses.replace(data, source=given) if given else data
    token_file = prepare_tokens(data.source, cache_folder(), data, bar if sys.stderr.isatty() else silent)
    bar.clear()
    agreed = agree_on_data(dataclasses.replace(manifest, data=data), token_file)
    return agreed, Corpus(token_file, agreed)


def _print_progress(entry: HistoryEntry) -> None:
    print(f"step {entry.step + 1}  loss {entry.loss:.4f}", file=sys.stderr, flush=True)
