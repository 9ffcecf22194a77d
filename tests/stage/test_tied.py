"""A weight that the first and the last stage hold: one weight in effect, equal to the bit at both, whatever the training option."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, WrongStateError
from peerd.models.stages import build_stage, estimate_stage_memory, initial_parameter_spec
from peerd.planner.cutting import stage_layers
from peerd.planner.decoder import decoder_loads
from peerd.planner.memory import Placing, stage_memory
from peerd.planner.workload import estimate_stage, stage_load
from peerd.reference import train_reference
from peerd.stage.holdings import history_from, history_tensors
from peerd.table.record import Lineage, Phase
from tests.stage.test_options import OPTIONS, Chain, Plain, run_with, worst_difference
from tests.tiny_run import corpus_of, tiny_manifest

WEIGHT = "embedding.weight"
STEPS = 3


def tied(manifest: Manifest) -> Manifest:
    return replace(manifest, model=replace(manifest.decoder, tie_word_embeddings=True))


def assert_one_weight(chain: Chain) -> None:
    first, last = (
        {name: value.clone() for name, value in state.holdings.tied_tensors(state.record).items()}
        for state in (chain.states[0], chain.states[-1])
    )
    assert first.keys() == last.keys()
    assert f"parameters/{WEIGHT}" in first
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert chain.states[0].record.tied == chain.states[-1].record.tied != Lineage()


@pytest.mark.parametrize("option", ["lamb", "clipping", "delayed updates"])
def test_a_chain_of_stages_equals_a_plain_loop_over_a_whole_model_with_one_weight(option: str, tmp_path: Path) -> None:
    """The plain loop's model has one parameter, whose gradient torch sums by itself."""
    manifest = tied(run_with(OPTIONS[option], num_stages=3))
    corpus = corpus_of(manifest, tmp_path)
    chain, plain = Chain(manifest), Plain(manifest)
    norms, expected = chain.train(corpus, STEPS), plain.train(corpus, STEPS)
    assert worst_difference(chain.parameters, expected) < 1e-5
    assert [entry.loss for entry in chain.states[-1].history] == pytest.approx(plain.losses, rel=1e-6)
    if manifest.train.max_gradient_norm:
        assert norms == pytest.approx(plain.norms, rel=1e-5), "the weight counts once"
    assert_one_weight(chain)


@pytest.mark.parametrize("option", ["all", "float16"])
def test_a_chain_of_stages_equals_the_reference(option: str, tmp_path: Path) -> None:
    manifest = tied(run_with(OPTIONS[option], num_stages=2))
    corpus = corpus_of(manifest, tmp_path)
    chain, expected = Chain(manifest, keep_graph=True), train_reference(manifest, corpus, STEPS)
    norms = chain.train(corpus, STEPS)
    assert worst_difference(chain.parameters, expected.parameters) < 1e-6
    assert [entry.loss for entry in chain.states[-1].history] == [entry.loss for entry in expected.history]
    assert [norm for norm in norms if norm is not None] == expected.norms
    assert_one_weight(chain)


def test_the_number_of_stages_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    """But for one, in which a microbatch's two gradients are summed in float32."""
    runs = [train_reference(m, corpus_of(m, tmp_path), 2) for m in (tied(run_with({}, num_stages=n)) for n in (1, 2, 3))]
    assert all(torch.equal(runs[1].parameters[name], value) for name, value in runs[2].parameters.items())
    assert worst_difference(runs[0].parameters, runs[1].parameters) < 1e-5
    assert "head.weight" not in runs[0].parameters


def test_both_stages_begin_with_one_weight_that_is_the_whole_models() -> None:
    manifest = tied(tiny_manifest(3))
    found = [dict(build_stage(manifest, stage, "cpu").named_parameters()) for stage in range(3)]
    assert [WEIGHT in each for each in found] == [True, False, True]
    whole = dict(build_stage(tied(tiny_manifest(1)), 0, "cpu").named_parameters())
    assert torch.equal(found[0][WEIGHT], found[2][WEIGHT])
    assert torch.equal(found[0][WEIGHT], whole[WEIGHT])
    assert whole.keys() == {name for each in found for name in each}


def test_a_joiner_catches_up_and_takes_over_with_the_sums_that_others_applied(tmp_path: Path) -> None:
    manifest = tied(run_with({"max_gradient_norm": 0.5, "delayed_updates": True}, num_stages=2))
    corpus = corpus_of(manifest, tmp_path)
    peers, late, new = Chain(manifest), Chain(manifest), Chain(manifest)
    for joiner in (*late.states, *new.states):
        joiner.begin_joining()
    for step in range(2):
        peers.accumulate(corpus, step)
        averages, norm = peers.average()
        for joiner, average in zip(late.states, averages, strict=True):
            joiner.catch_up(replace(average, norm=norm))
        peers.commit(norm)
    for donor, caught_up, joiner in zip(peers.states, late.states, new.states, strict=True):
        joiner.load(donor.holdings.tensors(donor.record), donor.record.step, donor.record.lineage, donor.history)
        assert caught_up.record.lineage == joiner.record.lineage == donor.record.lineage
        assert caught_up.record.tied == joiner.record.tied == donor.record.tied
        assert caught_up.record.tied_sums == donor.record.tied_sums
        assert joiner.record.tied_sums == (), "what it did not apply it cannot give"
        found = [each.holdings.tensors(each.record) for each in (donor, caught_up, joiner)]
        assert all(torch.equal(each[name], value) for each in found[1:] for name, value in found[0].items())


def test_a_step_is_not_finished_with_another_sum_than_was_decided(tmp_path: Path) -> None:
    manifest = tied(run_with({}, num_stages=2))
    corpus, chain = corpus_of(manifest, tmp_path), Chain(manifest)
    chain.accumulate(corpus, 0)
    chain.average()
    state = chain.states[0]
    for odd in (None, b"other"):
        with pytest.raises(WrongStateError, match="does not hold the average"):
            state.commit(None, odd)  # type: ignore[arg-type]
    assert (state.record.step, state.record.phase) == (0, Phase.AVERAGED)
    before = state.average
    state.take_tied(chain.states[1].record.average_id, state.record.tied_sum, state.record.tied_sum, torch.zeros(1))
    assert state.average is before, "a sum of another average comes too late"


def test_the_other_stages_copy_takes_the_place_of_one_with_a_worse_history(tmp_path: Path) -> None:
    manifest = tied(run_with({"delayed_updates": True}, num_stages=2))
    corpus, chain = corpus_of(manifest, tmp_path), Chain(manifest)
    chain.train(corpus, 1)
    first, last = chain.states
    chain.accumulate(corpus, 1)
    chain.average()
    first.commit(None, first.record.tied_sum)
    last.skip_step()  # nobody alive held its average
    assert last.record.tied.inexact == 1
    with pytest.raises(WrongStateError, match="history is no better"):
        first.copy_tied(last.holdings.tied_tensors(last.record), 2)
    copy = first.holdings.tied_tensors(first.record)
    with pytest.raises(BadMessageError, match="lacks a tensor"):
        last.copy_tied(copy | {f"parameters/{WEIGHT}": torch.zeros(3)}, 2)
    with pytest.raises(BadMessageError, match="no history"):
        last.copy_tied({name: value for name, value in copy.items() if not name.startswith("tied/")}, 2)
    with pytest.raises(WrongStateError, match="another step"):
        last.copy_tied(copy, 1)
    before = last.record
    last.copy_tied(copy, 2)
    assert_one_weight(chain)
    assert last.record.done == 0
    assert last.record.ledger_no > before.ledger_no
    assert last.record.lineage != before.lineage
    chain.train(corpus, 3)
    assert_one_weight(chain)


@given(st.integers(0, 1 << 24), st.binary(max_size=32))
def test_a_copys_history_comes_back_from_a_state_as_it_was(inexact: int, chain: bytes) -> None:
    assert history_from(history_tensors(Lineage(inexact, chain))) == Lineage(inexact, chain)


@pytest.mark.parametrize(
    "changes",
    [
        {"inexact": torch.tensor(-1.0)},
        {"inexact": torch.tensor([1.0])},
        {"chain": torch.tensor([256.0])},
        {"chain": torch.tensor([0.5])},
        {"chain": torch.zeros(33)},
        {"chain": torch.zeros(3, dtype=torch.float64)},
        {"other": torch.zeros(1)},
    ],
)
def test_a_history_that_can_be_none_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="history"):
        history_from(history_tensors(Lineage(0, b"abc")) | changes)


# What it costs, and what it does not go with


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_the_planner_counts_the_copy_where_there_is_one(num_stages: int) -> None:
    manifest = tied(tiny_manifest(num_stages))
    model, train = manifest.decoder, manifest.train
    loads = decoder_loads(model, train.microbatch_size, train.sequence_length)
    vocabulary = model.vocab_size * model.d_model
    for stage, layers in enumerate(stage_layers(manifest, loads)):
        load = stage_load(manifest, loads, layers)
        assert load.num_parameters == sum(torch.Size(shape).numel() for shape in initial_parameter_spec(manifest, stage).values())
        holds = num_stages > 1 and stage in (0, num_stages - 1)
        assert load.num_tied == vocabulary * holds
        assert stage_memory(manifest, load, 0, Placing.TOGETHER) == estimate_stage_memory(manifest, stage, 0)
        apart = estimate_stage(manifest, loads, layers).averaging_bytes - 2 * 4 * load.num_parameters
        assert apart == 4 * vocabulary * holds


def test_copies_are_not_averaged_apart() -> None:
    with pytest.raises(ValueError, match=r"model\.tie_word_embeddings cannot go with train\.average_parameters"):
        tied(tiny_manifest(2, average_parameters="always"))
    assert tied(tiny_manifest(1, average_parameters="always")).decoder.tie_word_embeddings
