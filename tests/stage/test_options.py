"""Training options: a chain of stages equals a plain loop over the whole model, which uses nothing of ours but the model.

The chain goes through StageState as a peer does: tickets, ledgers, rounds, and the norms that stages tell each other.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from peerd.averaging.compression import Compression
from peerd.averaging.handover import check_header, packed
from peerd.config.manifest import Manifest, TrainConfig
from peerd.models.dropout import dropout_of
from peerd.models.stages import StageModule, build_stage
from peerd.policy.step.ledger import number_of
from peerd.policy.step.norms import combine
from peerd.policy.step.roster import Roster, entry_of
from peerd.policy.step.tied import sum_id
from peerd.reference import train_reference
from peerd.stage.microbatches import backward, forward, forward_backward
from peerd.stage.results import HeldAverage, HeldMicrobatch, Ticket
from peerd.stage.state import StageState
from peerd.table.record import AverageId, PeerId, PeerRecord
from peerd.train.corpus import Corpus
from tests.strategies import view_of
from tests.tiny_run import corpus_of, replace_train, tiny_manifest

CPU = torch.device("cpu")
STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "lamb": {"optimizer": "lamb", "weight_decay": 0.1},
    "muon": {"optimizer": "muon", "weight_decay": 0.1, "max_gradient_norm": 0.5},
    "sgd": {"optimizer": "sgd", "learning_rate": 0.3, "weight_decay": 0.1},
    "cosine": {"schedule": "cosine", "warmup_steps": 2, "decay_steps": 4, "final_learning_rate": 1e-4},
    "clipping": {"max_gradient_norm": 0.5},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16", "loss_scale": 2.0**17, "loss_scale_growth_steps": 2},
    "dropout": {"dropout": 0.2},
    "parameter averaging": {"average_parameters": "always", "average_parameters_every_steps": 2},
    "delayed updates": {"delayed_updates": True},
    "all": {
        "delayed_updates": True,
        "optimizer": "lamb",
        "max_gradient_norm": 0.5,
        "precision": "bfloat16",
        "dropout": 0.1,
        "no_decay": ("embedding.*",),
    },
}

PACKED: dict[str, dict[str, Any]] = {
    "8 bits": {"optimizer_bits": 8, "max_gradient_norm": 0.5},
    "8 bits, sgd": {"optimizer_bits": 8, "optimizer": "sgd", "learning_rate": 0.3, "weight_decay": 0.1},
    "8 bits, delayed updates": {"optimizer_bits": 8, "delayed_updates": True},
}
"""The plain loop does not know these."""


def run_with(options: dict[str, Any], num_stages: int) -> Manifest:
    return tiny_manifest(num_stages, **{"accumulate": "float64", "learning_rate": 0.01, **options})


# The chain


@dataclass
class Chain:
    """One peer per stage, in one process."""

    manifest: Manifest
    keep_graph: bool = False
    offloads: bool = False
    states: list[StageState] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        for stage in range(self.manifest.train.num_stages):
            record = PeerRecord(peer=PeerId(f"p{stage}"), stage=stage)
            live = lambda record=record: view_of(record)  # noqa: E731
            state = StageState(self.manifest, record, CPU, live, self.keep_graph, offloads=self.offloads)
            state.serve()
            self.states.append(state)

    def microbatch(self, corpus: Corpus, step: int, index: int) -> None:
        tokens, labels = corpus.microbatch(step, index)
        batches: list[HeldMicrobatch] = []
        for state in self.states:
            mark = (state.record.incarnation, number_of(state.record, step))
            batches.append(HeldMicrobatch(Ticket(step, index, mark, accumulate=True), tokens, labels))
            if not state.holdings.module.is_last:
                tokens = forward(state, batches[-1])
        outcome = forward_backward(self.states[-1], batches[-1])
        assert outcome.refused == ""
        for state, batch in zip(self.states[-2::-1], batches[-2::-1], strict=True):
            assert outcome.gradient is not None
            outcome = backward(state, batch, outcome.gradient)
            assert outcome.refused == ""

    def average(self) -> tuple[list[HeldAverage], float | None]:
        """Everybody averages alone; returns also the norm that they make of what all tell."""
        for state in self.states:
            entry = entry_of(state.record)
            roster = Roster(state.record.stage, state.record.step, 0, entry.peer, (entry,))
            reason, copy = state.open_round(roster)
            assert reason == ""
            assert copy is not None
            state.take_average(roster, copy)
        self.sum_tied()
        told = [state.record.gradient_norm for state in self.states]
        norm = combine([each for each in told if each is not None]) if None not in told else None
        return [state.average for state in self.states if state.average is not None], norm

    def sum_tied(self) -> None:
        """The first and the last stage give each other their share of a tied weight's gradients."""
        ends = (self.states[0], self.states[-1])
        if not self.manifest.ties_stages:
            return
        ids = [state.record.average_id for state in ends]
        shares = [state.accumulator.tied_of(state.average.flat_sum) for state in ends if state.average is not None]
        for state, own, other, share in zip(ends, ids, reversed(ids), reversed(shares), strict=True):
            state.take_tied(own, sum_id(*ids), other, share)

    def commit(self, norm: float | None) -> None:
        for state in self.states:
            state.commit(norm, self.tied_sum_of(state))

    def tied_sum_of(self, state: StageState) -> AverageId | None:
        return state.record.tied_sum if state.holdings.tied_names else None

    def accumulate(self, corpus: Corpus, step: int) -> None:
        for index in range(self.manifest.train.microbatches_per_step):
            self.microbatch(corpus, step, index)

    def train(self, corpus: Corpus, steps: int = STEPS) -> list[float | None]:
        norms = []
        for step in range(self.states[0].record.step, steps):
            self.accumulate(corpus, step)
            norms.append(self.average()[1])
            self.commit(norms[-1])
        return norms

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach() for state in self.states for name, value in state.holdings.newest.named_parameters()}


# The plain loop


@dataclass
class Plain:
    """What a tutorial would write: one model, torch's optimizers and clipping, a loss scale by hand."""

    manifest: Manifest
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def train(self, corpus: Corpus, steps: int = STEPS) -> dict[str, Tensor]:
        train, model = self.manifest.train, build_stage(replace_train(self.manifest, num_stages=1), 0, CPU)
        late = copy.deepcopy(model)
        optimizer = PlainOptimizer(train, dict(model.named_parameters()))
        scale, good_steps = train.loss_scale if train.precision == "float16" else 1.0, 0
        for step in range(steps):
            losses = []
            sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in model.named_parameters()}
            for index in range(train.microbatches_per_step):
                computing = late if train.delayed_updates else model
                losses.append(self._backward(computing, corpus, step, index, scale))
                for name, value in computing.named_parameters():
                    assert value.grad is not None
                    sums[name] += value.grad.double() / scale
                    value.grad = None
            for name, value in model.named_parameters():
                value.grad = (sums[name] / train.microbatches_per_step).float()
            late.load_state_dict(model.state_dict())  # what the next step is computed with, where updates are late
            finite = all(bool(torch.isfinite(total).all()) for total in sums.values())
            if train.max_gradient_norm:
                self.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), train.max_gradient_norm)))
            if finite:
                optimizer.step(self._rate(step))
            if train.precision == "float16":
                good_steps = good_steps + 1 if finite else 0
                scale = scale / 2 if not finite else scale
                if good_steps == train.loss_scale_growth_steps:
                    scale, good_steps = scale * 2, 0
                self.norms.append(0.0 if finite else math.inf)
            for value in model.parameters():
                value.grad = None
            self.losses.append(sum(losses) / len(losses))
        return {name: value.detach() for name, value in model.named_parameters()}

    def _backward(self, model: StageModule, corpus: Corpus, step: int, index: int, scale: float) -> float:
        tokens, labels = corpus.microbatch(step, index)
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.manifest.train.precision, torch.bfloat16)
        lowered = torch.autocast("cpu", dtype=dtype, enabled=self.manifest.train.precision != "float32")
        with dropout_of(model, self.manifest, step, index), lowered:
            loss: Tensor = model(tokens, labels)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _rate(self, step: int) -> float:
        train = self.manifest.train
        if train.schedule == "constant":
            return train.learning_rate
        if step < train.warmup_steps:
            return train.learning_rate * (step + 1) / train.warmup_steps
        share = (step + 1 - train.warmup_steps) / (train.decay_steps - train.warmup_steps)
        return train.final_learning_rate + (train.learning_rate - train.final_learning_rate) * 0.5 * (1 + math.cos(math.pi * share))


class PlainOptimizer:
    """LAMB, Muon and SGD as their papers write them, and torch's AdamW."""

    def __init__(self, train: TrainConfig, parameters: dict[str, nn.Parameter]) -> None:
        self.train, self.parameters, self.updates = train, parameters, 0
        self.first = {name: torch.zeros_like(value) for name, value in parameters.items()}
        self.second = {name: torch.zeros_like(value) for name, value in parameters.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        self.updates += 1
        for name, value in self.parameters.items():
            assert value.grad is not None
            spared = value.dim() < 2 or (self.train.no_decay and name.startswith("embedding."))
            decay = 0.0 if spared else self.train.weight_decay
            in_layer = name.startswith("blocks.") and value.dim() == 2
            if self.train.optimizer == "adamw" or (self.train.optimizer == "muon" and not in_layer):
                self._adamw(name, value, rate, decay)
            else:
                value.sub_(rate * self._direction(name, value, value.grad, decay))

    def _adamw(self, name: str, value: nn.Parameter, rate: float, decay: float) -> None:
        train, moments, step = self.train, ([self.first[name]], [self.second[name]]), torch.tensor(float(self.updates - 1))
        rates: dict[str, Any] = {"lr": rate, "beta1": train.beta1, "beta2": train.beta2, "eps": train.epsilon, "weight_decay": decay}
        assert value.grad is not None
        adamw([value], [value.grad], *moments, [], [step], amsgrad=False, maximize=False, fused=True, **rates)

    def _direction(self, name: str, value: Tensor, gradient: Tensor, decay: float) -> Tensor:
        train = self.train
        if train.optimizer == "muon":
            self.first[name] = train.muon_momentum * self.first[name] + (1 - train.muon_momentum) * gradient
            mixed = (1 - train.muon_momentum) * gradient + train.muon_momentum * self.first[name]
            return newton_schulz(mixed.double()).float() * 0.2 * math.sqrt(max(value.shape)) + decay * value
        if train.optimizer == "sgd":
            self.first[name] = train.momentum * self.first[name] + gradient + decay * value
            return self.first[name]
        m = self.first[name] = train.beta1 * self.first[name] + (1 - train.beta1) * gradient
        v = self.second[name] = train.beta2 * self.second[name] + (1 - train.beta2) * gradient**2
        mean, square = m / (1 - train.beta1**self.updates), v / (1 - train.beta2**self.updates)
        direction = mean / (square.sqrt() + train.epsilon) + decay * value
        return direction * value.norm() / direction.norm() if value.norm() > 0 else direction


def newton_schulz(matrix: Tensor) -> Tensor:
    """Five times p(X) = a X + b (X X^T) X + c (X X^T)^2 X, of each singular value by itself."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values /= values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    found: Tensor = left @ values.diag() @ right
    return found


def worst_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """As a share of each tensor's largest value."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp_min(1e-30)) for name in expected)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_chain_of_stages_equals_a_plain_loop_over_the_whole_model(option: str, tmp_path: Path) -> None:
    manifest = run_with(OPTIONS[option], num_stages=3)
    corpus = corpus_of(manifest, tmp_path)
    chain, plain = Chain(manifest), Plain(manifest)
    norms, expected = chain.train(corpus), plain.train(corpus)
    assert worst_difference(chain.parameters, expected) < 1e-5
    assert [entry.loss for entry in chain.states[-1].history] == pytest.approx(plain.losses, rel=1e-6)
    if manifest.train.max_gradient_norm:
        assert norms == pytest.approx(plain.norms, rel=1e-5)
        assert max(plain.norms) > manifest.train.max_gradient_norm, "nothing was clipped"
    elif manifest.train.precision == "float16":
        assert [norm == math.inf for norm in norms] == [norm == math.inf for norm in plain.norms]
        assert {norm == math.inf for norm in norms} == {True, False}, "some steps overflow, and some do not"
    else:
        assert norms == [None] * STEPS


@pytest.mark.parametrize("option", OPTIONS | PACKED)
def test_a_chain_of_stages_equals_the_reference(option: str, tmp_path: Path) -> None:
    """To the bit where sums in double precision hide their order; microbatches come in another order here."""
    manifest = run_with((OPTIONS | PACKED)[option], num_stages=2)
    corpus = corpus_of(manifest, tmp_path)
    chain, expected = Chain(manifest, keep_graph=True), train_reference(manifest, corpus, STEPS)
    norms = chain.train(corpus)
    assert worst_difference(chain.parameters, expected.parameters) < 1e-6
    assert [entry.loss for entry in chain.states[-1].history] == [entry.loss for entry in expected.history]
    assert [norm for norm in norms if norm is not None] == expected.norms


@pytest.mark.parametrize(
    "option", [{"optimizer": "lamb", "max_gradient_norm": 0.5}, {"optimizer": "muon"}, {"delayed_updates": True}, {"accumulate": "float64"}]
)
def test_offloading_changes_no_bit(option: dict[str, Any], tmp_path: Path) -> None:
    """Its copies are made on a CPU, too, where they are of no use."""
    manifest = run_with(option, num_stages=2)
    corpus = corpus_of(manifest, tmp_path)
    kept, offloaded = (Chain(manifest, offloads=each) for each in (False, True))
    kept.train(corpus, 3)
    offloaded.train(corpus, 3)
    for state, other in zip(kept.states, offloaded.states, strict=True):
        found, expected = (each.holdings.tensors(each.record) for each in (other, state))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("option", ["clipping", "muon", "float16", "parameter averaging", "delayed updates", "8 bits"])
def test_a_joiner_that_catches_up_applies_the_norm_that_it_is_told(option: str, tmp_path: Path) -> None:
    manifest = run_with((OPTIONS | PACKED)[option], num_stages=2)
    corpus = corpus_of(manifest, tmp_path)
    peers, joiners = Chain(manifest), Chain(manifest)
    for joiner in joiners.states:
        joiner.begin_joining()
    for step in range(2):
        peers.accumulate(corpus, step)
        averages, norm = peers.average()
        for state, joiner, average in zip(peers.states, joiners.states, averages, strict=True):
            header, file = packed(average)
            check_header(replace(header, chunk_hashes=file.hashes()), joiner, step, None, Compression(joiner.weight_codecs, torch.float32))
            joiner.catch_up(replace(average, norm=norm))
            state.commit(norm)
    for state, joiner in zip(peers.states, joiners.states, strict=True):
        assert joiner.record.lineage == state.record.lineage
        found, expected = (each.holdings.tensors(each.record) for each in (joiner, state))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("option", ["clipping", "muon", "float16", "delayed updates"])
def test_a_joiner_takes_over_norms_and_loss_scale_and_goes_on_to_the_bit(option: str, tmp_path: Path) -> None:
    manifest = run_with(OPTIONS[option], num_stages=2)
    corpus = corpus_of(manifest, tmp_path)
    donors, joiners = Chain(manifest), Chain(manifest)
    donors.train(corpus, 2)
    for donor, joiner in zip(donors.states, joiners.states, strict=True):
        joiner.begin_joining()
        joiner.load(donor.holdings.tensors(donor.record), donor.record.step, donor.record.lineage, donor.history)
        joiner.serve()
        assert joiner.record.norms == donor.record.norms
        assert joiner.gradient_norms == donor.gradient_norms
    assert donors.train(corpus) == joiners.train(corpus)
    assert all(torch.equal(donors.parameters[name], value) for name, value in joiners.parameters.items())
