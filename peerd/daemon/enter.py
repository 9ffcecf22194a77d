"""Entering the swarm, as its organiser or by an address: from settings to a node that can be reached."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch

from peerd.config.manifest import Manifest, load
from peerd.config.organiser import KEY_FILE, load_key
from peerd.config.paths import Home, cache_folder
from peerd.config.settings import Settings
from peerd.daemon.address import Address, parse_address
from peerd.daemon.device import choose_device, free_memory_bytes
from peerd.daemon.network import Network, ask_for_run, open_network
from peerd.daemon.node import Node, Place, Stage, Swarm
from peerd.errors import ManifestError, RemoteError, StageError, UnreachableError
from peerd.models.stages import estimate_stage_memory_bytes
from peerd.policy.admission import choose_stage
from peerd.stage.executor import Executor, Priority
from peerd.stage.service import slots_of
from peerd.stage.state import StageState
from peerd.swarm.directory import Directory
from peerd.swarm.identity import Identity, LocalState
from peerd.swarm.membership import Membership
from peerd.swarm.signed import SignedManifest, sign_manifest
from peerd.table.record import PeerId, PeerRecord
from peerd.table.view import TTL_PERIODS
from peerd.train.data import STDLIB, Corpus, agree_on_data, prepare_tokens
from peerd.wire.clients import SwarmClient

LOCAL_SOURCE = "local"
"""What a signed manifest calls text that only its organiser has; peers never learn a path of another machine."""
FIRST_LOOK_TIMEOUT_S = 10.0
LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Text:
    """The run's text on this machine, if it is here."""

    corpus: Corpus | None
    source: str


async def enter(settings: Settings, home: Home, stack: contextlib.AsyncExitStack) -> Node:
    """A node that serves its services and is in the DHT. What it opened is closed by `stack`."""
    identity, local = Identity.load_or_create(home.identity), LocalState(home)
    device = choose_device(settings.device)
    address = parse_address(settings.join) if settings.join else None
    signed, text = (None, None) if address else await asyncio.to_thread(_organise, settings)
    membership: Membership | None = None

    def addresses_of(peer: PeerId) -> tuple[str, ...]:
        known = membership.addresses_of(peer) if membership is not None else ()
        return known or ((address.multiaddr,) if address is not None and address.peer == peer else ())

    local_only = address is None or address.is_loopback
    settings = replace(settings, host=settings.host or ("127.0.0.1" if local_only else "0.0.0.0"))  # noqa: S104 - volunteers serve
    network = await open_network(settings, home, (address.multiaddr,) if address else (), addresses_of)
    stack.push_async_callback(network.close)
    if address is not None:
        signed = await ask_for_run(network, address)
        if local.pin(signed.run, signed.organiser_key):
            LOG.info("organiser pinned", run=signed.run, organiser=signed.organiser_key.hex())
        text = await asyncio.to_thread(_text_for, signed.manifest, settings)
    assert signed is not None
    assert text is not None
    train, swarm = signed.manifest.train, signed.manifest.swarm
    membership = Membership(identity, signed.run, TTL_PERIODS * swarm.announce_period_s)
    bootstrap = (address.multiaddr,) if address else ()
    directory = await Directory.join(network.p2pd.p2p, signed.run, train.num_stages, swarm.announce_period_s, bootstrap)
    stack.push_async_callback(directory.close)
    directory.store_manifest_soon(signed)
    if address is not None:
        await first_look(network, membership, signed, address)
    place = _find_place(settings, signed, device, text, membership)
    executor = Executor()
    stack.callback(executor.close)
    state = await executor.run(Priority.CONTROL, lambda: _build_state(place, membership, local))
    node = Node(settings, place, network, Swarm(membership, local), Stage(executor, state))
    node.attach(directory, text.corpus)
    await network.serve(node.servicers)
    stack.push_async_callback(network.stop_serving)
    return node


def _organise(settings: Settings) -> tuple[SignedManifest, Text]:
    """Read run.toml, make the token file, sign."""
    path = Path(settings.run_file)
    manifest = load(path)
    source = settings.data or manifest.data.source
    if source != STDLIB:
        source = str((path.parent / Path(source).expanduser()).absolute())
    manifest = agree_on_data(manifest, tokens := prepare_tokens(source, cache_folder()))
    corpus = Corpus(tokens, manifest)
    published = replace(manifest, data=replace(manifest.data, source=STDLIB if source == STDLIB else LOCAL_SOURCE))
    return sign_manifest(published, load_key(path.parent / KEY_FILE)), Text(corpus, source)


def _text_for(manifest: Manifest, settings: Settings) -> Text:
    """The run's text if this machine has it; a peer without it serves a stage and launches nothing."""
    source = settings.data or (STDLIB if manifest.data.source == STDLIB else "")
    if not source:
        return Text(None, "")
    try:
        tokens = prepare_tokens(source, cache_folder())
        agree_on_data(manifest, tokens)
        return Text(Corpus(tokens, manifest), source)
    except ManifestError as error:
        if settings.data:
            raise
        LOG.info("this machine's text is not the run's, so it launches no microbatches", reason=error.message)
        return Text(None, "")


async def first_look(network: Network, membership: Membership, signed: SignedManifest, address: Address) -> None:
    """The whole table, from the peer at the address."""
    request = SwarmClient(network.links, signed.run).gossip(address.peer, [], FIRST_LOOK_TIMEOUT_S, want_all=True)
    try:
        membership.absorb_quietly(await request)
    except RemoteError as error:
        raise UnreachableError(
            f"{address.peer} does not tell who is in the swarm: {error.message}", "try again, or join at another peer"
        ) from None


def _find_place(settings: Settings, signed: SignedManifest, device: torch.device, text: Text, membership: Membership) -> Place:
    memory_bytes = free_memory_bytes(device)
    stage = _stage_to_serve(settings, signed.manifest, membership, memory_bytes)
    return Place(signed=signed, stage=stage, device=device, memory_bytes=memory_bytes, data_source=text.source)


def _build_state(place: Place, membership: Membership, local: LocalState) -> StageState:
    """On the torch thread: its number of threads, then the stage's first weights."""
    if place.manifest.compute.threads:
        torch.set_num_threads(place.manifest.compute.threads)
    seen = membership.find(membership.me)
    incarnation = local.raise_incarnation(seen.incarnation if seen else 0)
    record = PeerRecord(peer=membership.me, incarnation=incarnation, stage=place.stage)
    return StageState(place.manifest, record, place.device, membership.live)


def _stage_to_serve(settings: Settings, manifest: Manifest, membership: Membership, memory_bytes: int) -> int:
    """The stage asked for, or the one that needs help most. StageError when it is unknown or does not fit."""
    num_stages = manifest.train.num_stages
    needed = [estimate_stage_memory_bytes(manifest, stage, slots_of(manifest)) for stage in range(num_stages)]
    if settings.stage >= num_stages:
        raise StageError(f"there is no stage {settings.stage}", f"this run's stages are 0 to {num_stages - 1}; leave --stage out")
    if settings.stage >= 0:
        if needed[settings.stage] > memory_bytes:
            raise StageError(
                f"stage {settings.stage} needs {needed[settings.stage] / 1e9:.2f} GB of memory and {memory_bytes / 1e9:.2f} GB is free",
                "leave --stage out, or free some memory",
            )
        return settings.stage
    choice = choose_stage(membership.live(), needed, memory_bytes)
    if choice.stage is None:
        raise StageError(f"no stage fits this machine: {choice.reason}", "join from a machine with more memory")
    LOG.info("stage chosen", stage=choice.stage, reason=choice.reason)
    return choice.stage
