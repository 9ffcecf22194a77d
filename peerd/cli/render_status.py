"""The text of `peerd status --long`."""

from __future__ import annotations

import time

from rich.text import Text

from peerd.cli.audit import audits_line
from peerd.cli.render import (
    AT_WORK_FROM_S,
    amount,
    console,
    counted,
    duration,
    exactness,
    held_by,
    line_in_words,
    local_batch_at,
    loss_rows,
    lossy_paths,
    name_of,
    own_updates,
    pause_line,
    phase_of,
    plain,
    print_health,
    print_rows,
    short_id,
)
from peerd.control.protocol import PeerInfo, StatusReply


def print_status(reply: StatusReply) -> None:
    """Print the status of this daemon."""
    out = console()
    print_rows(out, _status_rows(reply))
    print_health(out, reply["health"])
    # One line without breaks, so that it can be copied.
    out.print(Text(f"others join with: peerd join {plain(reply['join'], 400)}"), soft_wrap=True)


def _groups_row(reply: StatusReply) -> list[tuple[str, str]]:
    """How the stage averages, once this peer has made the sum of a group."""
    size, made = reply["run"].get("group_size", 0), reply["counters"].get("group_sums", 0)
    of = f"{made} sums of groups and {reply['counters'].get('average_sections', 0)} sections of averages made"
    return [("averaging", f"in groups of about {size} peers; {of}")] if size and made else []


def _status_rows(reply: StatusReply) -> list[tuple[str, str]]:
    run, peer, counters = reply["run"], reply["peer"], reply["counters"]
    end = f" of {run['steps']}" if run["steps"] else ""
    work = f"{counters['accumulated_microbatches']} done, {counters['replayed_microbatches']} launched again"
    traffic = f"{amount(counters['bytes_sent'])}B sent, {amount(counters['bytes_received'])}B received"
    rows = [
        ("run", f"{plain(run['name'])} ({plain(run['id'])})"),
        *((name, plain(text, 600)) for name, text in run.get("about", {}).items()),
        *([("name", name_of(peer))] if name_of(peer) else []),
        ("peer", f"{plain(peer['id'])}, up {duration(reply['uptime_s'])}, process {reply['pid']}"),
        ("stage", f"{peer['stage']} (of 0 to {run['num_stages'] - 1}) on {plain(peer['device'], 20)}"),
        ("step", f"{peer['step']}{end}, {phase_of(peer)}, holds {held_by(peer)} of {run['microbatches_per_step']} microbatches"),
        *loss_rows(local_batch_at(run, peer["step"]) > 0, peer["last_loss"], reply.get("evaluation")),
        *_update_rows(reply),
        *_link_rows(reply),
        *computing_row(reply),
        *_memory_row(reply),
        *joining_row(reply),
        ("queue", f"{peer['queue']} waiting, {peer['in_flight']} in flight, {amount(peer['throughput'])} samples/s"),
        ("microbatches", work),
        ("exactness", exactness(counters)),
        *_groups_row(reply),
        ("traffic", traffic),
        *_line_row(peer),
        *_direct_row(reply),
        ("data", plain(reply.get("data", ""))),
        *_access_row(reply),
        *_audits_row(reply),
        *texts_rows(reply),
        *_reach_rows(reply),
        ("decision", pause_line(reply["owner"]) or plain(reply["decision"])),
        ("rebalancing", plain(reply["rebalancing"]) or "not looked at yet"),
    ]
    if reply.get("dashboard"):
        rows.append(("dashboard", f"{plain(reply['dashboard'])} (`peerd dashboard --open`)"))
    if reply["compute_stand_in_ms"] or reply["slow_factor"] != 1:
        rows.append(
            ("stand-in", f"{reply['compute_stand_in_ms']:g} ms per microbatch, {reply['slow_factor']:g}x slow: speeds are not real")
        )
    return rows


def _access_row(reply: StatusReply) -> list[tuple[str, str]]:
    """Tell who may take part, where the run is by invitation or its organiser has made a list."""
    access = reply.get("access")
    if access is None or not (access["by_invitation"] or access["number"]):
        return []
    until = access["invited_until"]
    told = ["by invitation" if access["by_invitation"] else "open"]
    if until:
        told.append(f"this peer's invitation ends {time.strftime('%Y-%m-%d %H:%M %Z', time.localtime(until))}")
    if access["number"]:
        told.append(f"list {access['number']} of the organiser allows {access['allowed']} and bans {len(access['banned'])}")
    return [("access", "; ".join(told))]


def _audits_row(reply: StatusReply) -> list[tuple[str, str]]:
    found = reply.get("audits")
    return [("audits", audits_line(found))] if found is not None else []


def texts_rows(reply: StatusReply) -> list[tuple[str, str]]:
    """What this peer computes for those who ask the model; none from older daemons."""
    found = reply.get("texts")
    if found is None:
        return []
    if not found["share"]:
        return [("answers", "nobody who asks the model; `peerd limits --inference 2%` changes that")]
    now = "answers now" if found["answering"] else "not asked now"
    waiting = f", {found['waiting']} wait" if found["waiting"] else ""
    held_up = f" (training waited {duration(found['held_up_s'])})" if found.get("held_up_s") else ""
    kept = f"{counted(found['texts'], 'text')} kept in {amount(found['bytes'])}B of {amount(found['most_bytes'])}B"
    steps = f"; with the parameters of step {', '.join(map(str, found['steps']))}" if found["steps"] else ""
    copy = f", a second copy of {amount(found['copy_bytes'])}B" if found.get("copy_bytes") else ""
    return [("answers", f"{now}{waiting}: {amount(found['tokens'])} tokens in {duration(found['busy_s'])}{held_up}; {kept}{steps}{copy}")]


def _memory_row(reply: StatusReply) -> list[tuple[str, str]]:
    """The device's memory, where it has its own or did not suffice."""
    found = reply.get("memory")
    if found is None or not (found["held"] or found["shortage"] or reply["owner"]["resting"]):
        return []
    told = "; the optimizer's state is in the machine's memory" if found.get("offloads") else ""
    told += f"; {plain(found['shortage'])}" if found["shortage"] else ""
    return [("memory", f"{amount(found['held'])}B held of {amount(found['total'])}B, {amount(found['used'])}B in use by all{told}")]


def computing_row(reply: StatusReply) -> list[tuple[str, str]]:
    """The microbatch that is computed, where one takes so long that the peer might seem to stand still."""
    found = reply.get("computing")
    if found is None or max(found["for_s"], found["usual_s"]) < AT_WORK_FROM_S:
        return []
    usual = f"; one takes {duration(found['usual_s'])} here" if found["usual_s"] else ""
    return [("computes", f"microbatch {found['index']} of step {found['step']} for {duration(found['for_s'])}{usual}")]


def joining_row(reply: StatusReply) -> list[tuple[str, str]]:
    """The plan of a peer that does not serve its stage yet."""
    found = reply.get("joining")
    return [("joins", plain(found["plan"], 300))] if found and found["plan"] else []


def _update_rows(reply: StatusReply) -> list[tuple[str, str]]:
    update = reply.get("update")
    if update is None:
        return []
    text, norm, most = f"learning rate {update['learning_rate']:.3g}", update["gradient_norm"], update["max_gradient_norm"]
    if norm is not None:
        text += f", gradient norm {norm:.3g}" + (f" clipped to {most:g}" if 0 < most < norm else "")
    if update["loss_scale"] is not None:
        text += f", loss scale {update['loss_scale']:g}"
    if update.get("drift") is not None:
        text += f", parameters {update['drift']:.1e} off the mates' mean when last averaged"
    text += ", moments in 8 bits" if update.get("optimizer_bits") == 8 else ""
    text += f", by {plain(update['optimizer'], 20)}" if "optimizer" in update else ""
    rows = [("update", text)]
    if local_batch := update.get("local_batch", 0):
        begins = reply["run"].get("local_steps_after", 0)
        before = "" if local_batch_at(reply["run"], reply["peer"]["step"]) else f"from step {begins} on; "
        rows.append(("local steps", before + own_updates(reply["counters"], local_batch)))
    return rows


def _line_row(peer: PeerInfo) -> list[tuple[str, str]]:
    words = line_in_words(peer.get("up", 0), peer.get("down", 0))
    return [("line", f"{words}, as measured")] if words else []


def _direct_row(reply: StatusReply) -> list[tuple[str, str]]:
    """The row about direct connections."""
    direct = reply.get("direct")
    if direct is None:
        return []
    local = direct.get("local", 0)
    beside = f", a local socket to {local}" if local else ""
    if not direct["port"]:
        return [("direct", f"none: {plain(direct['why']) or 'no port was free'}{beside}")]
    punched = direct.get("quic", 0)
    beside += f", QUIC through routers to {punched}" if punched else ""
    told = [f"TLS to {counted(direct['peers'] - local - punched, 'peer')}{beside}; takes connections at port {direct['port']}"]
    if (why := direct.get("quic_why", "")) and reply.get("reach", {}).get("state") in ("relayed", "client"):
        told.append(f"no QUIC through routers: {plain(why)}")
    return [("direct", "; ".join((*told, *lossy_paths((line["peer"], line) for line in reply.get("lines", [])))))]


def _reach_rows(reply: StatusReply) -> list[tuple[str, str]]:
    reach, relay = reply.get("reach"), reply.get("relay")
    rows = [("reach", f"{plain(reach['state'], 12)}: {plain(reach['reason'])}")] if reach else []
    if relay and relay["volunteers"]:
        places, circuits = counted(relay["reservations"], "peer"), counted(relay["circuits"], "circuit")
        carries = f"{places} behind it, {circuits}, {amount(relay['bytes'])}B carried"
        rows.append(("relay", f"off: {plain(relay['off'])}" if relay["off"] else carries))
    return rows


def _link_rows(reply: StatusReply) -> list[tuple[str, str]]:
    """A row for each link and direction, in runs where links choose their codecs."""
    rows = []
    for link in reply.get("links", []):
        way, rate = ("to" if link["tensor"] == "activations" else "from"), link["rate"]
        speed = f"{8 * rate / 1e6:,.1f} Mbit/s, " if rate else ""
        rows.append(("link", f"{way} {short_id(link['peer'])} as {plain(link['codec'], 16)}: {speed}{plain(link['reason'])}"))
    return rows
