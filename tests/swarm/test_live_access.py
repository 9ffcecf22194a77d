"""Bans and invitations among real daemons: `peerd ban` shuts a peer out of all of them, and a run by invitation takes nobody else."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from dataclasses import replace
from typing import Any

import pytest

from peerd.config.manifest import Manifest
from peerd.errors import ExitCode, UnwelcomeError
from tests.swarm.daemons import Daemon, Swarm, run_peerd, until
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest
from tests.swarm.visitor import visiting

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

PACE_MS = 40
HEARD_WITHIN_S = 10.0
"""The list goes to all at once; the rest is for a machine that is busy."""


def by_invitation(manifest: Manifest) -> Manifest:
    return replace(manifest, swarm=replace(manifest.swarm, access="invited"))


def peerd(swarm: Swarm, of: Daemon, *arguments: str) -> dict[str, Any]:
    """What the organiser's command says, at the terminal of this daemon's home."""
    done = run_peerd(swarm.environment, *arguments, "--run", swarm.run_file, "--home", of.home.folder, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def peers_of(daemon: Daemon) -> set[str]:
    return {peer["id"] for stage in daemon.table["stages"] for peer in stage["peers"]}


def test_a_banned_peer_is_dropped_by_all_within_a_moment_and_says_why_and_the_run_goes_on_exactly() -> None:
    manifest = swarm_manifest(num_stages=1)
    with Swarm(manifest) as swarm:
        first = swarm.start(compute_stand_in_ms=PACE_MS)
        stays = [swarm.join(compute_stand_in_ms=PACE_MS)]
        noisy = swarm.join(compute_stand_in_ms=PACE_MS, ephemeral=False)
        swarm.wait_for_step(2)
        banned = noisy.ready.peer
        for daemon in (first, *stays):
            until(lambda daemon=daemon: events_of(daemon, "started"), HEARD_WITHIN_S)  # type: ignore[misc]
        told = peerd(swarm, first, "ban", banned, "--reason", "sends noise")
        began_s = time.monotonic()
        assert (told["number"], told["banned"], told["daemons"]) == (1, [{"peer": banned, "reason": "sends noise"}], 1)
        for daemon in (first, *stays):
            until(lambda daemon=daemon: banned not in peers_of(daemon), HEARD_WITHIN_S)  # type: ignore[misc]
            assert daemon.status["access"]["number"] == 1
        assert noisy.exit_code() == ExitCode.SHUT_OUT
        assert time.monotonic() - began_s < HEARD_WITHIN_S + 5
        assert (
            f"banned this peer from the run: sends noise; ask the organiser, who can let it back in with `peerd ban --lift {banned}`"
            in (noisy.error_lines[-1])
        )
        step = first.status["peer"]["step"]
        for daemon in (first, *stays):
            daemon.wait_for_step(step + 3)
        for daemon in (first, *stays):
            assert banned not in peers_of(daemon)
            assert [item["title"] for item in daemon.status["health"] if item["code"] == "banned"] == [
                f"banned by the organiser: {banned} (sends noise)"
            ]
            until(lambda daemon=daemon: events_of(daemon, "banned") == ["sends noise"], HEARD_WITHIN_S)  # type: ignore[misc]
        again = swarm.spawn_with(replace(noisy.settings, join=swarm.address))
        assert again.exit_code() == ExitCode.SHUT_OUT
        assert "banned this peer from the run: sends noise" in again.error_lines[-1]
        peerd(swarm, first, "ban", "--lift", banned)
        back = swarm.spawn_with(replace(noisy.settings, join=stays[0].ready.join))
        back.wait_until_serving()
        until(lambda: all(banned in peers_of(daemon) for daemon in (first, *stays)), HEARD_WITHIN_S)
        swarm.wait_for_step(first.status["peer"]["step"] + 2)
        swarm.assert_exact()
        exported = swarm.export(first)
        assert_equals_reference(exported, manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")
        back.request("leave")
        assert back.exit_code() == 0
        shutil.rmtree(noisy.home.folder)


@pytest.mark.slow
def test_a_run_by_invitation_takes_invited_peers_and_nobody_else() -> None:
    with Swarm(by_invitation(swarm_manifest(num_stages=1))) as swarm:
        first = swarm.start(compute_stand_in_ms=PACE_MS)
        assert first.status["access"]["by_invitation"]
        comes = swarm.join(compute_stand_in_ms=PACE_MS, ephemeral=False)
        assert comes.exit_code() == ExitCode.SHUT_OUT
        said = comes.error_lines[-1]
        assert "only invited peers take part in this run; send the organiser this peer's id, 12D3KooW" in said
        peer = said.partition("id, ")[2][:52]
        told = peerd(swarm, first, "invite", peer, "--days", "30")
        assert [each["peer"] for each in told["invitations"]] == [peer]
        invited = swarm.spawn_with(replace(comes.settings, join=swarm.address, invitation=told["invitations"][0]["invitation"]))
        invited.wait_until_serving()
        assert invited.ready.peer == peer
        assert invited.status["access"]["invited_until"] == told["until"]
        until(lambda: peer in peers_of(first), HEARD_WITHIN_S)

        listed = swarm.join(compute_stand_in_ms=PACE_MS, ephemeral=False)
        assert listed.exit_code() == ExitCode.SHUT_OUT
        other = listed.error_lines[-1].partition("id, ")[2][:52]
        assert peerd(swarm, invited, "invite", other, "--list")["allowed"] == [other]
        welcome = swarm.spawn_with(replace(listed.settings, join=swarm.address))
        welcome.wait_until_serving()
        for daemon in (first, invited, welcome):
            until(lambda daemon=daemon: {peer, other} <= peers_of(daemon), HEARD_WITHIN_S)  # type: ignore[misc]
            assert daemon.status["access"]["number"] == 1

        asyncio.run(_is_refused(first))
        until(lambda: first.status["access"]["refused"] > 0)
        invited.request("leave")
        assert invited.exit_code() == 0
        back = swarm.spawn_with(replace(comes.settings, join=swarm.address))
        back.wait_until_serving()  # its home remembers the invitation
        swarm.wait_for_step(first.status["peer"]["step"] + 2)
        swarm.assert_exact()
        for daemon in (back, welcome):
            daemon.request("leave")
            assert daemon.exit_code() == 0
            shutil.rmtree(daemon.home.folder)


def events_of(daemon: Daemon, kind: str) -> list[str]:
    """The texts of the events of this kind that it has noted. The first look at its table notes no more than that it has started."""
    return [each["text"] for each in daemon.request("history", since=0, events=True)["events"] if each["kind"] == kind]


async def _is_refused(daemon: Daemon) -> None:
    """Somebody without an invitation gets no state and no work done, whatever it calls."""
    async with visiting(daemon.ready.join) as visitor:
        with pytest.raises(UnwelcomeError, match="not invited"):
            await visitor.snapshot(daemon.ready.peer, 0)  # type: ignore[arg-type]
        with pytest.raises(UnwelcomeError, match="not invited"):
            await visitor.send(daemon.ready.peer, visitor.call(0, 0))  # type: ignore[arg-type]
