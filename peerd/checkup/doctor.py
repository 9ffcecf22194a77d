"""Checks what a volunteer can get wrong. A check that cannot be made is a finding, too, and the others go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from peerd.checkup import here as here
from peerd.checkup.here import Order
from peerd.config.paths import Home
from peerd.control.client import ControlClient
from peerd.errors import PeerdError, system_error
from peerd.policy.owner.governor import Limits
from peerd.policy.swarm.checkup import (
    Dialled,
    Finding,
    of_daemons_relays,
    of_dial_backs,
    of_direct,
    of_memory,
    of_no_direct,
    ok,
    problem,
    warning,
    with_relay,
    worst,
)
from peerd.table.record import PeerId

DIAL_BACK_SILENCE_S = 60.0
MAX_CONTACTS = 4


class Checkup:
    """The findings in the order in which they are made. `tell` hears of each part when it begins, and of each finding at once."""

    def __init__(self, tell: Callable[[Mapping[str, Any]], None] = lambda _line: None) -> None:
        self.findings: list[Finding] = []
        self._tell = tell

    def begins(self, part: str) -> None:
        self._tell({"begins": part})

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            self._tell({"found": asdict(finding)})
            self.findings.append(finding)

    def attempt(self, code: str, check: Iterator[Finding]) -> None:
        """Add what a check finds. A check that fails is a finding, too."""
        self.begins(code)
        try:
            for finding in check:
                self.add(finding)
        except Exception as error:  # a broken installation breaks in many ways, and telling of it is what the doctor is for
            self.add(_unchecked(code, error))


def examine(order: Order, tell: Callable[[Mapping[str, Any]], None] = lambda _line: None) -> list[Finding]:
    """Check everything, this machine first. `tell` hears of each part when it begins, and of each finding at once."""
    if order.self_test:
        return self_test(order.device, tell)
    report = Checkup(tell)
    home = Home(Path(order.home))
    status, findings = here.running_daemon(home)
    runs = status is not None
    limits, set_by_owner = here.owners_limits(home, status)
    report.add(*findings)
    _examine_here(order, home, report, runs, limits, set_by_owner)
    under_way = "address"
    try:
        contacts, remembered = _contacts(order, home, runs)
        taken = {finding.code for finding in report.findings if finding.verdict != "ok"}
        # The rest can be told on any port.
        order = replace(order, port=0 if runs or "port" in taken else order.port, direct_port=0 if "direct" in taken else order.direct_port)
        under_way = "p2pd"
        asyncio.run(_examine_network(order, limits, contacts, status, remembered, report))
    except PeerdError as error:
        report.add(*_memory(order, limits, []), problem(under_way, error.message, error.remedy or "install peerd anew"))
    except Exception as error:  # such as a library that is not there, or that does not load
        report.add(_unchecked("network", error))
    return report.findings


def _examine_here(order: Order, home: Home, report: Checkup, runs: bool, limits: Limits, set_by_owner: Sequence[Finding]) -> None:
    """What can be checked without the network. `runs`: a daemon of this home does, which has the ports and the checkpoints."""
    report.attempt("platform", here.platform_line())
    report.attempt("versions", here.versions())
    report.attempt("device", here.device(order.device))
    report.attempt("disk", here.disk(home))
    report.attempt("open-files", here.open_files())
    report.attempt("pauses", here.pauses())
    report.attempt("home", here.home_files(home))
    if not runs:
        report.attempt("checkpoints", here.checkpoints(home))
    report.add(*set_by_owner)
    report.attempt("limits", here.gpu_tells(limits, order.device))
    if not runs:
        report.attempt("port", here.port(order.host, order.port, home))
        report.attempt("direct", here.direct_port(order.host, order.direct_port))
    report.attempt("leftovers", here.leftovers(home, runs=runs))


def self_test(device: str, tell: Callable[[Mapping[str, Any]], None] = lambda _line: None) -> list[Finding]:
    """Test the device alone. `tell` hears of each part when it begins, and of each finding at once: a device may end this process."""
    from peerd.checkup.device.self_test import examine as examine_device

    report = Checkup(tell)
    report.attempt("platform", here.platform_line())
    report.attempt("versions", here.versions())
    report.attempt("device", examine_device(device, report.begins))
    return report.findings


def _unchecked(code: str, error: Exception) -> Finding:
    told = system_error(error) if isinstance(error, OSError) else None
    if told is not None:
        return problem(code, told.message, told.remedy)
    said = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    return problem(code, f"could not be checked: {said}", "install peerd anew with the versions in scripts/constraints.txt")


def _contacts(order: Order, home: Home, runs: bool) -> tuple[list[Any], bool]:
    """Whom to ask: the addresses given, else the peers that this home's daemon knows, else those it has met."""
    from peerd.daemon.address import parse_address
    from peerd.swarm.identity import LocalState

    if order.addresses:
        return [parse_address(each) for each in order.addresses], False
    known: Sequence[str] = []
    if runs:
        peers = [peer for stage in ControlClient(home).request("peers")["stages"] for peer in stage["peers"]]
        own = ControlClient(home).request("status")["peer"]["id"]
        known = [peer["addresses"][0] for peer in peers if peer["addresses"] and peer["id"] != own]
    else:
        try:
            known = LocalState(home).peers
        except PeerdError:
            return [], True  # told with the home
    return [parse_address(each) for each in known[:MAX_CONTACTS]], True


async def _examine_network(
    order: Order, limits: Limits, contacts: list[Any], status: Mapping[str, Any] | None, remembered: bool, report: Checkup
) -> None:
    from peerd.checkup import there as there
    from peerd.daemon.network import visitor

    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)  # hivemind's tasks end with errors that nobody reads
    report.begins("p2pd")
    async with visitor(contacts, order.host, order.port, map_port=True) as (network, identity, book):
        report.add(ok("p2pd", "p2pd starts"))
        if not contacts:
            report.add(
                *_memory(order, limits, []), warning("reach", "nobody asked: no peer is known", "peerd doctor ADDRESS checks the rest")
            )
            return
        report.begins("reach")
        contact, reached = await there.reach(network, identity, contacts)
        if contact is None:
            told = [_milder(each) if remembered else each for each in reached]
            report.add(*_memory(order, limits, []), *told)
            return
        book.update({record.peer: record.addresses for record in contact.membership.live().records if record.addresses})
        needed = await asyncio.to_thread(contact.stage_memory_bytes, here.is_apart(order.device))
        report.add(*_memory(order, limits, needed), *reached)
        report.begins("clock")
        report.add(await there.clocks(network, contact), *_files_for(len(contact.peers)))
        report.begins("dial-back")
        if status is not None:
            report.add(*await asyncio.to_thread(_told_by_daemon, Home(Path(order.home)), status))
        else:
            async for finding in there.ways_in(network, identity, contact, order, limits):
                report.add(finding)
        report.begins("upload")
        async for finding in there.examine(network, contact, limits):
            report.add(finding)


def _milder(finding: Finding) -> Finding:
    """That a peer met earlier is gone is no fault of this machine."""
    if finding.code != "reach":
        return finding
    return warning("reach", finding.title, "it may be gone for good: ask the organiser for an ADDRESS, and run peerd doctor ADDRESS")


def _memory(order: Order, limits: Limits, needed: list[int]) -> list[Finding]:
    try:
        return [of_memory(here.free_memory(order.device), needed, limits.memory)]
    except PeerdError:
        return []  # told with the device
    except Exception as error:  # torch may be what is broken
        return [_unchecked("memory", error)]


def _files_for(num_peers: int) -> list[Finding]:
    """Said only where the swarm is too large for the limit of open files."""
    return [finding for finding in here.open_files(num_peers) if num_peers > 1 and finding.verdict == "problem"]


def _told_by_daemon(home: Home, status: Mapping[str, Any]) -> list[Finding]:
    """Whether the running daemon can be reached at its own port under its own key."""
    try:
        reply = ControlClient(home).request("reach", silence_s=DIAL_BACK_SILENCE_S)
    except PeerdError as error:
        return [warning("dial-back", error.message, error.remedy or "try again")]
    dial_back = of_dial_backs(_answers_in(reply), reply["port"])
    relay = of_daemons_relays(dial_back, status["reach"]["state"] == "relayed", status["reach"]["reason"])
    direct = reply.get("direct")  # absent where the daemon is older
    if direct is None:
        return [with_relay(dial_back, relay), relay]
    quic = direct.get("quic_why", "an older daemon makes none")
    past_the_tunnel = of_direct(_answers_in(direct), direct["port"], quic) if direct["port"] else of_no_direct(direct["why"])
    return [with_relay(dial_back, relay), relay, past_the_tunnel]


def _answers_in(told: Mapping[str, Any]) -> list[Dialled]:
    return [Dialled(PeerId(each["peer"]), each["observed"], each["reached"]) for each in told["answers"]]


def run(request: Order) -> dict[str, Any]:
    def tell(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    findings = examine(request, tell)
    return {"worst": worst(findings), "checks": [asdict(finding) for finding in findings]}
