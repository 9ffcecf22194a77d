"""Turns measurements into findings for a volunteer: ok, warning or problem, and what to do about it. Pure: others measure."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peerd.policy.owner.governor import Limits, Pause
from peerd.policy.round.needs import StageNeed, mbit, shortfall
from peerd.policy.swarm.clocks import MAX_CLOCK_OFFSET_S, ClockOffset, Whose, judge_clocks, span
from peerd.table.record import PeerId

LITTLE_MEMORY_BYTES = 1 << 30
NO_DISK_BYTES, LITTLE_DISK_BYTES = 200 << 20, 5 << 30
MIN_OPEN_FILES = 1024
FILES_OF_A_DAEMON, FILES_FOR_A_PEER, MOST_AT_ONCE = 64, 16, 250
"""A daemon alone has 48 open. For each peer that it exchanges tensors with it has seven for small messages both ways, two for direct
connections, and six while the tunnel carries tensors both ways, and a minute longer; one more while it dials. In a large swarm it has
connections to those that it exchanged something with lately: with few files left, what nothing has used for 90 s is closed
(`connections.py`), and hardly anybody works with more than the third number within that time."""
SLOW_UPLOAD_BITS_PER_S, SLOW_DOWNLOAD_BITS_PER_S = 5e6, 10e6
OF_THE_MACHINE = ("disk", "open-files", "clock", "clocks-differ", "p2pd-down", "internal-errors")
"""The codes of the daemon's health that a checkup repeats."""
CAPPED = "a cap is set, which the tunnel keeps"
"""The reason for having no direct connections."""
TOO_SLOW = (
    "it may join and compute, but averages take longer for it, or end without it and its work: "
    "use a faster line, raise a cap that is in the way, or ask the organiser for a run with smaller stages or codecs"
)
"""What happens to a machine whose line is too slow, and what to do about it."""
FAIR_SHARE = 0.8
"""Share of the measured rate that a cap should leave to peerd."""


class Verdict(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a checkup."""

    code: str
    verdict: Verdict
    title: str
    remedy: str = ""


def ok(code: str, title: str) -> Finding:
    return Finding(code, Verdict.OK, title)


def warning(code: str, title: str, remedy: str) -> Finding:
    return Finding(code, Verdict.WARNING, title, remedy)


def problem(code: str, title: str, remedy: str) -> Finding:
    return Finding(code, Verdict.PROBLEM, title, remedy)


def worst(findings: Sequence[Finding]) -> Verdict:
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


def of_versions(found: Mapping[str, str], needed: Mapping[str, str]) -> list[Finding]:
    """One line per library that is needed; `found` lacks those that are not installed."""
    findings = []
    for name, least in needed.items():
        version = found.get(name)
        remedy = "install peerd anew with the versions in scripts/constraints.txt, or let scripts/peerd do it"
        if version is None:
            findings.append(problem(name, f"{name} is not installed", remedy))
        elif numbers_in(version) < numbers_in(least):
            findings.append(problem(name, f"{name} {version} is older than {least}", remedy))
        else:
            findings.append(ok(name, f"{name} {version}"))
    return findings


def numbers_in(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.6.0rc1+cpu -> 2, 6, 0."""
    leading = re.sub(r"[^0-9.].*", "", version, flags=re.DOTALL)
    return tuple(int(part) for part in leading.split(".") if part)


def of_memory(free_bytes: int, needed_bytes: Sequence[int], allowed_bytes: int = 0) -> Finding:
    """`needed_bytes` by stage; empty where the run is not known. `allowed_bytes` by the owner; 0: all."""
    title, more = f"{_gigabytes(free_bytes)} of memory free", "close other programs"
    if 0 < allowed_bytes < free_bytes:
        title, more = f"{_gigabytes(allowed_bytes)} of memory allowed", "allow more with `peerd limits --memory`"
        free_bytes = allowed_bytes
    if needed_bytes:
        least, most = min(needed_bytes), max(needed_bytes)
        title += f", this run's stages take {_gigabytes(least)} to {_gigabytes(most)}"
        if free_bytes < least:
            return problem("memory", title, f"{more}, or join from a machine with more memory")
        if free_bytes < most:
            return warning("memory", title, f"{more}, or this machine can serve some of the stages only")
    elif free_bytes < LITTLE_MEMORY_BYTES:
        return warning("memory", title, f"{more}; most stages need more")
    return ok("memory", title)


def of_limits(limits: Limits, pause: Pause | None) -> list[Finding]:
    """What the owner has set, where it keeps this machine from working or makes others wait. `pause`: why it would not work now."""
    findings = []
    if pause is not None:
        remedy = f"it goes on {pause.until}; `peerd limits` shows what is set"
        findings.append(warning("limits", f"a daemon here does not work now: {pause.reason}", remedy))
    for way, cap, least in (("upload", limits.upload, SLOW_UPLOAD_BITS_PER_S), ("download", limits.download, SLOW_DOWNLOAD_BITS_PER_S)):
        if 0 < 8 * cap < least:
            remedy = f"others wait for what a slow connection carries: `peerd limits --{way} {least / 1e6:g}Mbit`"
            findings.append(warning("limits", f"only {_megabits(8 * cap)} of {way} allowed", remedy))
    return findings or [ok("limits", "nothing that the owner has set keeps it out")]


def of_disk(folder: str, free_bytes: int) -> Finding:
    title = f"{_gigabytes(free_bytes)} of disk free for {folder}"
    if free_bytes < NO_DISK_BYTES:
        return problem("disk", title, "free some space, or choose a home on another disk with --home")
    if free_bytes < LITTLE_DISK_BYTES:
        return warning("disk", title, "a run's text and checkpoints may need more: free some space")
    return ok("disk", title)


def of_health(items: Sequence[Mapping[str, str]]) -> list[Finding]:
    """What a running daemon finds wrong with its machine; the run's own troubles are no findings."""
    verdicts = {"problem": problem, "warning": warning}
    return [verdicts[item["severity"]](item["code"], item["title"], item["remedy"]) for item in items if item["code"] in OF_THE_MACHINE]


def files_needed(num_peers: int) -> int:
    """Files and sockets that a daemon has open when it works with so many others."""
    return FILES_OF_A_DAEMON + FILES_FOR_A_PEER * min(num_peers, MOST_AT_ONCE)


def too_few_files(limit: int, num_peers: int) -> tuple[str, str]:
    """What is missing, and what to do."""
    needed = files_needed(num_peers)
    others = f"for {num_peers} other peers" if num_peers > 1 else f"at least, {FILES_FOR_A_PEER} more for each other peer"
    remedy = f"raise it, `ulimit -n {max(needed, MIN_OPEN_FILES)}` or LimitNOFILE= of a service; beyond the hard limit only root may"
    return f"this peer needs {needed} open files {others}, and the limit is {limit}", remedy


def of_open_files(limit: int, num_peers: int = 1) -> Finding:
    """`limit`: the most that the system lets this process have."""
    if limit < files_needed(num_peers):
        return problem("open-files", *too_few_files(limit, num_peers))
    most = (limit - FILES_OF_A_DAEMON) // FILES_FOR_A_PEER
    title = f"{limit} open files allowed, enough for {most if most < MOST_AT_ONCE else 'any number of'} other peers"
    if limit < MIN_OPEN_FILES:
        return warning("open-files", title, f"raise the limit: ulimit -n {MIN_OPEN_FILES}")
    return ok("open-files", title)


def of_pauses(*, begins_slowly: bool) -> Finding:
    """`begins_slowly`: whether a connection that was idle does, as Linux lets it by default."""
    if not begins_slowly:
        return ok("pauses", "connections keep their speed over a pause")
    return warning(
        "pauses",
        "Linux lets connections begin slowly again after each pause; over long lines steps may take a seventh longer",
        "as an administrator: sysctl net.ipv4.tcp_slow_start_after_idle=0",
    )


def of_clocks(offsets: Sequence[ClockOffset]) -> Finding:
    """Those of the peers that were asked; the first is the contact's."""
    verdict = judge_clocks(offsets)
    if verdict.whose is not Whose.NOBODYS:
        return (warning if verdict.whose is Whose.THEIRS else problem)("clock", verdict.title, verdict.remedy)
    offset_s, round_trip_s = offsets[0].offset_s, offsets[0].round_trip_s
    if abs(offset_s) > MAX_CLOCK_OFFSET_S / 3 + round_trip_s / 2:
        title = f"this machine's clock is {span(offset_s)} {'ahead of' if offset_s > 0 else 'behind'} the swarm's"
        return warning("clock", title, f"more than {MAX_CLOCK_OFFSET_S:g} s keep it out: switch on NTP")
    return ok("clock", f"clock within {max(abs(offset_s), round_trip_s / 2):.1f} s of the swarm's")


@dataclass(frozen=True, slots=True)
class Dialled:
    """What one peer said when asked to dial back; `reached` is None where it did not say."""

    peer: PeerId
    observed: str
    reached: bool | None


def of_dial_backs(answers: Sequence[Dialled], port: int) -> Finding:
    """Whether this machine can be reached from outside, as several peers found. Peers on this machine itself say nothing of that."""
    said = [answer for answer in answers if answer.reached is not None]
    reached = sum(bool(answer.reached) for answer in said)
    seen = sorted({answer.observed for answer in said if answer.observed})
    where = f"port {port} at {' and '.join(seen)}" if seen else f"port {port}"
    remedy = f"forward TCP port {port} on your router to this machine and let it through the firewall; a fixed one is chosen with --port"
    if not said:
        return warning("dial-back", "no peer could say whether this machine can be reached", "try again in a minute, or at another peer")
    counted = f"{reached} of {len(said)} peers"
    whence = "on this machine" if seen and all(address.startswith("127.") for address in seen) else "from outside"
    if reached == 0:
        return problem("dial-back", f"{counted} reached {where} {whence}", remedy)
    if reached < len(said):
        return warning("dial-back", f"{counted} reached {where} {whence}", remedy)
    if len(seen) > 1:
        return warning(
            "dial-back", f"{counted} reached {where}", "peers see this machine at several addresses: some may not reach it later"
        )
    return ok("dial-back", f"{counted} reached {where} {whence}")


def of_direct(answers: Sequence[Dialled], port: int, why_no_quic: str) -> Finding:
    """Whether others reach the port for direct TLS connections. Never a problem: the tunnel carries the tensors otherwise.

    `why_no_quic`: the reason for making no connections through routers; empty where they are made.
    """
    said = [answer for answer in answers if answer.reached is not None]
    reached = sum(bool(answer.reached) for answer in said)
    if not said:
        remedy = "try again in a minute, or at another peer"
        return warning("direct", "no peer could say whether direct connections get through", remedy)
    title = f"{reached} of {len(said)} peers reached port {port} for direct connections"
    if reached < len(said):
        remedy = f"forward TCP port {port}, too, and let it through the firewall; a fixed one is chosen with --direct-port"
        quic = f"QUIC through routers: {why_no_quic}" if why_no_quic else "QUIC serves where the routers allow it"
        return warning("direct", title, f"tensors take the tunnel, which is slower; {remedy}; {quic}")
    return ok("direct", title)


def of_no_direct(why: str) -> Finding:
    """The finding for a daemon without direct connections. `why` is the owner's reason; empty if no port was free."""
    if why:
        return ok("direct", f"no direct connections: {why}")
    return warning("direct", "no port was free for direct connections", "choose one with --direct-port")


def of_relay(dial_back: Finding, refusals: Sequence[str]) -> Finding:
    """Whether a machine that nobody can dial is reached all the same. `refusals`: the reason of each relay asked; empty: it has a place."""
    if dial_back.verdict is Verdict.OK:
        return ok("relay", "no relay needed")
    places = sum(not refusal for refusal in refusals)
    if places:
        return ok("relay", f"{places} of {len(refusals)} relays asked {'has' if places == 1 else 'have'} a place for this machine")
    remedy = "others do not reach this machine unless it has dialled them: open a port"
    if refusals:
        return warning("relay", f"no relay has a place for this machine: {refusals[0]}", remedy)
    return warning("relay", "no peer volunteers as a relay", f"{remedy}, or ask one that can be dialled to start with --relay")


def of_daemons_relays(dial_back: Finding, is_relayed: bool, reason: str) -> Finding:
    """As `of_relay`, for a running daemon, which tells whether it is relayed."""
    if dial_back.verdict is Verdict.OK:
        return ok("relay", "no relay needed")
    if is_relayed:
        return ok("relay", f"others reach the daemon: {reason}")
    remedy = "open a port, or ask a peer that can be dialled to start with --relay"
    return warning("relay", f"others do not reach the daemon: {reason}", remedy)


def with_relay(dial_back: Finding, relay: Finding) -> Finding:
    """A machine that nobody can dial is no problem if a relay has a place for it."""
    if dial_back.verdict is not Verdict.PROBLEM or relay.verdict is not Verdict.OK:
        return dial_back
    return warning(dial_back.code, dial_back.title, f"a relay carries it, which is slower; better: {dial_back.remedy}")


def of_speed(up_bits_per_s: float | None, down_bits_per_s: float | None, limits: Limits) -> list[Finding]:
    """None where it could not be measured. A cap that the line cannot fill protects nothing."""
    findings = []
    for code, rate, least, cap in (
        ("upload", up_bits_per_s, SLOW_UPLOAD_BITS_PER_S, 8 * limits.upload),
        ("download", down_bits_per_s, SLOW_DOWNLOAD_BITS_PER_S, 8 * limits.download),
    ):
        if rate is None:
            findings.append(warning(code, f"the {code} could not be measured", "the peer may be busy: try again in a minute"))
        elif rate < least:
            remedy = "stop other transfers, use a cable; others wait for what a slow connection carries"
            findings.append(warning(code, f"{_megabits(rate)} {code}", remedy))
        elif rate < cap:
            remedy = f"it leaves nothing for others here: `peerd limits --{code} {FAIR_SHARE * rate / 1e6:.3g}Mbit`"
            findings.append(warning(code, f"{_megabits(rate)} {code}, less than the cap of {_megabits(cap)}", remedy))
        else:
            findings.append(ok(code, f"{_megabits(rate)} {code}"))
    return findings


def of_line(up_bits_per_s: float | None, down_bits_per_s: float | None, limits: Limits, needs: Sequence[StageNeed]) -> list[Finding]:
    """Whether this machine's line, within its owner's caps, carries the averages of the run's stages."""
    rates = [(up_bits_per_s, limits.upload), (down_bits_per_s, limits.download)]
    up, down = (min(rate / 8, cap or rate / 8) if rate is not None else 0.0 for rate, cap in rates)
    least, most = (pick((need.rounds for need in needs), default=0.0) for pick in (min, max))
    if not most or not up:
        return []  # a run of which nobody has computed anything; a line that could not be measured, which is told by itself
    if short := shortfall(up, down, least):
        return [warning("line", f"this run {short}", TOO_SLOW)]
    if short := shortfall(up, down, most):
        return [warning("line", f"a stage of this run {short}", f"in that stage {TOO_SLOW}")]
    pace = min(need.boundary_up for need in needs)
    more = f"; at its peers' pace microbatches take {mbit(pace)} Mbit/s, so it gets fewer of them" if up < pace else ""
    return [ok("line", f"this run needs {mbit(most)} Mbit/s up, this machine has {mbit(up)}{more}")]


def of_software(mine: str, theirs: str) -> Finding:
    if mine != theirs:
        remedy = "use the version that the run uses: ask its organiser"
        return warning("peerd", f"this is peerd {mine}, the peer there has {theirs}", remedy)
    return ok("peerd", f"peerd {mine}, like the peer there")


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.0f} MB"


def _megabits(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e6:.3g} Mbit/s" if bits_per_s < 1e9 else f"{bits_per_s / 1e9:.3g} Gbit/s"
