"""Where each metric's value comes from. Asked at scrape time only."""

from __future__ import annotations

import time

import psutil

from peerd import __version__
from peerd.audit.tallies import AuditOutcome
from peerd.control.protocol import Counters
from peerd.daemon.answers import Answers
from peerd.daemon.device import describe, memory_of, utilisation
from peerd.daemon.open_files import limit, num_open
from peerd.daemon.peer import Peer
from peerd.daemon.watching.observer import Observer
from peerd.link.segments import Segments
from peerd.link.traffic import PeerRole
from peerd.observe.metrics import MetricSource, Reading
from peerd.policy.step.ledger import missing, work_step
from peerd.timeline.spans import PHASES
from peerd.unwritten import UNWRITTEN

LAG_OVER_S = 60.0


def readings(peer: Peer, answers: Answers, observer: Observer | None) -> dict[str, MetricSource]:
    """By the metric's name, as METRICS lists them."""
    counters, record, device = answers.counters(), peer.seat.state.record, peer.governor.device
    evaluation, now_s = peer.seat.training.evaluation, time.monotonic()
    return {
        **_of_table(peer),
        "peerd_info": {(__version__, record.peer, peer.place.signed.run, peer.place.manifest.name, describe(device)): 1.0},
        "peerd_uptime_seconds": answers.uptime_s,
        "peerd_stage": record.stage,
        "peerd_step": record.step,
        "peerd_loss": answers.table()["last_loss"],
        "peerd_evaluation_loss": evaluation.loss if evaluation else None,
        "peerd_evaluation_step": evaluation.step if evaluation else None,
        "peerd_swarm_tokens_per_second": answers.tokens_per_second(),
        "peerd_samples_per_second": peer.seat.service.throughput,
        "peerd_line_bytes_per_second": dict(zip(("up", "down"), peer.network.links.traffic.line.claims(peer.governor.limits), strict=True)),
        **_of_paths(peer),
        "peerd_contributed_tokens_total": peer.seat.service.counters.tokens,
        "peerd_queue_microbatches": peer.seat.service.queue,
        "peerd_in_flight_microbatches": peer.seat.trainer.in_flight if peer.seat.trainer else 0,
        "peerd_phase_seconds_total": {(phase,): spent_s for phase, spent_s in observer.phase_s.items()} if observer else {},
        "peerd_executor_busy_seconds_total": peer.seat.executor.busy_s,
        "peerd_activity_seconds_total": {kind.name.lower(): spent_s for kind, spent_s in peer.spans.spent_s.items() if kind not in PHASES},
        "peerd_averages_total": peer.seat.rounds.num_applied,
        "peerd_own_updates_total": counters["own_updates"],
        "peerd_rounds_failed_total": counters["rounds_failed"],
        "peerd_group_sums_total": counters["group_sums"],
        "peerd_average_sections_total": counters["average_sections"],
        "peerd_bytes_total": {"sent": counters["bytes_sent"], "received": counters["bytes_received"]},
        "peerd_tensor_bytes_total": _of_tensors(peer),
        "peerd_boundary_bytes_total": counters["boundary_bytes"],
        "peerd_boundary_crossings_total": counters["boundary_crossings"],
        **_of_microbatches(counters),
        **_of_texts(peer),
        "peerd_inexact_steps_total": counters["inexact_steps"],
        "peerd_ledger_resets_total": counters["ledger_resets"],
        "peerd_reloads_total": counters["reloads"],
        "peerd_faults_seen_total": counters["faults_seen"],
        "peerd_messages_refused_total": counters["messages_refused"],
        "peerd_calls_put_off_total": counters["calls_put_off"],
        "peerd_internal_errors_total": counters["internal_errors"],
        "peerd_files_unwritten": len(UNWRITTEN.errors()),
        "peerd_moves_total": peer.moves,
        "peerd_p2pd_restarts_total": peer.p2pd_restarts,
        "peerd_join_seconds": peer.seat.join_took_s,
        "peerd_open_files": num_open,
        "peerd_open_files_limit": limit,
        "peerd_memory_resident_bytes": lambda: psutil.Process().memory_info().rss,
        "peerd_memory_device_bytes": lambda: memory_of(device).held,
        "peerd_device_memory_bytes": lambda: memory_of(device).total,
        "peerd_device_memory_used_bytes": lambda: memory_of(device).used,
        "peerd_device_utilisation_ratio": lambda: utilisation(device),
        "peerd_memory_available_bytes": peer.seat.room.device,
        "peerd_cpu_seconds_total": lambda: sum(psutil.Process().cpu_times()[:2]),
        "peerd_event_loop_lag_seconds": observer.lag.worst_s(LAG_OVER_S, now_s) if observer else 0.0,
        "peerd_event_loop_lag_quantile_seconds": observer.lag.quantiles(now_s) if observer else {},
        "peerd_health_items": _by_severity(answers),
    }


def _of_microbatches(counters: Counters) -> dict[str, Reading]:
    return {
        "peerd_microbatches_accumulated_total": counters["accumulated_microbatches"],
        "peerd_microbatch_calls_total": counters["microbatch_calls"],
        "peerd_microbatches_replayed_total": counters["replayed_microbatches"],
        "peerd_microbatches_suppressed_total": counters["suppressed_microbatches"],
        "peerd_microbatches_duplicate_total": counters["duplicate_microbatches"],
        "peerd_microbatches_lost_total": counters["lost_microbatches"],
    }


def _of_texts(peer: Peer) -> dict[str, Reading]:
    texts = peer.seat.texts
    return {
        "peerd_texts": len(texts.sessions.ids),
        "peerd_text_bytes": texts.sessions.num_bytes,
        "peerd_evaluated_copy_bytes": peer.seat.state.evaluated.num_bytes,
        "peerd_text_tokens_total": texts.counts.tokens,
        "peerd_text_seconds_total": texts.counts.busy_s,
        "peerd_text_training_waits_seconds_total": texts.counts.held_up_s,
        "peerd_asking": peer.num_asking,
    }


def _of_table(peer: Peer) -> dict[str, Reading]:
    live, train = peer.membership.live(), peer.place.manifest.train
    stages, step = range(train.num_stages), work_step(live, train.num_stages) or 0
    absent = {str(stage): missing(live, stage, step, train.microbatches_per_step) for stage in stages}
    return {
        "peerd_stage_peers": {str(stage): live.num_serving(stage) for stage in stages},
        "peerd_stage_queue_microbatches": {str(stage): live.queue(stage) for stage in stages},
        "peerd_stage_missing_microbatches": {stage: bitmap.bit_count() for stage, bitmap in absent.items()},
        "peerd_local_batch": train.local_batch if train.is_local_at(peer.seat.state.record.step) else 0,
        "peerd_suspects": len(peer.membership.live().suspected),
        "peerd_strangers": len(peer.membership.strangers()),
        "peerd_access_list": peer.membership.access.number,
        "peerd_banned_peers": len(peer.membership.access.listed.banned),
        "peerd_audits_total": _of_audits(peer),
        "peerd_audit_kept_bytes": peer.seat.witness.kept.num_bytes if peer.seat.witness else 0,
        "peerd_convicted_peers": len(peer.cases.losers),
        "peerd_unwelcome_calls_total": peer.membership.access.refused,
    }


def _of_audits(peer: Peer) -> Reading:
    auditor = peer.seat.auditor
    counts = auditor.tallies.counts if auditor is not None else {}
    return {outcome.value: float(counts.get(outcome, 0)) for outcome in AuditOutcome}


def _of_paths(peer: Peer) -> dict[str, MetricSource]:
    direct = peer.network.direct
    segments = direct.paths.segments.total if direct else Segments()
    holes = direct.holes if direct else None
    return {
        "peerd_direct_connections": direct.paths.num_connections if direct else 0,
        "peerd_segments_total": {"sent": segments.sent, "again": segments.again},
        "peerd_quic_connections": holes.num_lines if holes else 0,
        "peerd_quic_bytes_total": dict(zip(("sent", "received"), holes.num_bytes if holes else (0, 0), strict=True)),
    }


def _of_tensors(peer: Peer) -> dict[str | tuple[str, ...], float]:
    compression = peer.seat.rounds.compression
    mates = PeerRole.STAGE_PEER
    averaged = {("weight_gradients", codec, mates, way): total for (codec, way), total in compression.traffic.items()}
    return {labels: float(total) for labels, total in (*peer.network.links.traffic.tensors.items(), *averaged.items())}


def _by_severity(answers: Answers) -> dict[str | tuple[str, ...], float]:
    found: dict[str | tuple[str, ...], float] = {"info": 0, "warning": 0, "problem": 0}
    for item in answers.health():
        found[item["severity"]] += 1
    return found
