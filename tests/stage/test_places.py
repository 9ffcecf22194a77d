"""What a peer that offloads keeps on its device: the parameters of this step, and nothing that is set aside."""

from __future__ import annotations

import torch
from torch import Tensor

from peerd.models.stages import build_stage
from peerd.stage.places import Places
from peerd.stage.state import StageState
from peerd.table.record import PeerId, PeerRecord
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest

CPU, META = torch.device("cpu"), torch.device("meta")


def storages(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_what_is_set_aside_lies_on_the_host_and_is_computed_with_on_the_device() -> None:
    """The device of this test has no memory at all, so nothing that is on it can be read."""
    module = build_stage(tiny_manifest(2), 0, CPU)
    places = Places(META, offloads=True)
    aside = places.set_aside(module)
    assert {parameter.device for parameter in aside.parameters()} == {CPU}
    visitor = places.to_compute(aside)
    assert {parameter.device for parameter in visitor.parameters()} == {META}
    assert all(parameter.requires_grad for parameter in visitor.parameters())


def test_a_peer_that_does_not_offload_computes_with_what_is_set_aside_where_it_is() -> None:
    module = build_stage(tiny_manifest(2), 0, CPU)
    places = Places(CPU)
    aside = places.set_aside(module)
    assert storages([*aside.parameters()]).isdisjoint(storages([*module.parameters()]))
    assert places.to_compute(aside) is aside


def test_of_what_is_set_aside_one_copy_is_on_the_device_at_most_and_none_beside_this_steps_pass() -> None:
    module = build_stage(tiny_manifest(2), 0, CPU)
    places = Places(CPU, offloads=True)
    first, second = places.set_aside(module), places.set_aside(module)
    visitor = places.to_compute(first)
    assert visitor is places.to_compute(first)
    assert visitor is not first
    assert places.to_compute(second) is not visitor
    assert places._visitor is not None
    assert places.to_compute(module) is module
    assert places._visitor is None


def test_the_copy_is_of_the_parameters_as_they_are_now() -> None:
    record = PeerRecord(peer=PeerId("me"), stage=0)
    state = StageState(tiny_manifest(2), record, CPU, lambda: view_of(record), offloads=True)
    holdings = state.holdings

    def update() -> None:
        with torch.no_grad():
            for parameter in holdings.module.parameters():
                parameter.add_(1)

    for _ in range(2):
        before = [parameter.detach().clone() for parameter in holdings.module.parameters()]
        holdings.advance(update)
        late = holdings.of_step(-1)
        assert late is not None
        assert all(torch.equal(parameter, old) for parameter, old in zip(late.parameters(), before, strict=True))
