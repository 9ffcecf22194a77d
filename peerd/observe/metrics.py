"""The metrics of one daemon: name and meaning of each, and the text that Prometheus scrapes.

Nothing is counted for the metrics alone: each scrape calls `read`, which collects the values from the parts of the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Reading = float | Mapping[str | tuple[str, ...], float]
"""One value, or one for each combination of labels."""
MetricSource = Reading | None | Callable[[], Reading | None]
"""A value that is at hand, or a function that asks a sensor for it. None: it is not known, and the metric is left out."""
LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """Name, kind, help text and labels of a metric. The name of a counter ends in `_total`."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()


METRICS = (
    MetricSpec("peerd_info", "gauge", "Always 1; who this is", ("version", "peer", "run", "run_name", "device")),
    MetricSpec("peerd_uptime_seconds", "gauge", "Since this daemon started"),
    MetricSpec("peerd_stage", "gauge", "Stage this daemon serves"),
    MetricSpec("peerd_step", "gauge", "Step this daemon is at"),
    MetricSpec("peerd_loss", "gauge", "Mean loss of the last finished step, nats per token; with local steps not of the average"),
    MetricSpec("peerd_evaluation_loss", "gauge", "Mean loss on the evaluation text, nats per token; absent until one is known"),
    MetricSpec("peerd_evaluation_step", "gauge", "Step whose parameters the last evaluation is of; absent until one is known"),
    MetricSpec("peerd_swarm_tokens_per_second", "gauge", "Tokens the whole swarm trained on per second, over the last ten steps"),
    MetricSpec("peerd_samples_per_second", "gauge", "What this daemon computes while it has work, moving average"),
    MetricSpec("peerd_line_bytes_per_second", "gauge", "What the line carried while tensors passed, 0 if unknown", ("direction",)),
    MetricSpec("peerd_direct_connections", "gauge", "TCP connections of direct paths; a path has several where packets are lost"),
    MetricSpec(
        "peerd_segments_total", "counter", "TCP segments of direct paths, where the kernel tells: sent, and of these again", ("kind",)
    ),
    MetricSpec("peerd_quic_connections", "gauge", "Connections through the routers of both ends, by QUIC"),
    MetricSpec("peerd_quic_bytes_total", "counter", "Bytes of their packets, what QUIC adds included", ("direction",)),
    MetricSpec("peerd_contributed_tokens_total", "counter", "Tokens of microbatches this daemon accumulated"),
    MetricSpec("peerd_queue_microbatches", "gauge", "Microbatches this daemon holds"),
    MetricSpec("peerd_in_flight_microbatches", "gauge", "Microbatches this daemon has launched that are not back"),
    MetricSpec("peerd_stage_peers", "gauge", "Live peers that serve a stage", ("stage",)),
    MetricSpec("peerd_stage_queue_microbatches", "gauge", "Microbatches that the peers of a stage hold", ("stage",)),
    MetricSpec("peerd_stage_missing_microbatches", "gauge", "Microbatches of the step that no live peer of a stage holds", ("stage",)),
    MetricSpec("peerd_suspects", "gauge", "Peers that do not answer and whose record has not expired"),
    MetricSpec("peerd_strangers", "gauge", "Peers of which others tell and that nothing proves to be there; they count for nothing"),
    MetricSpec("peerd_access_list", "gauge", "Number of the organiser's list that this daemon has; 0: none"),
    MetricSpec("peerd_banned_peers", "gauge", "Peers that the organiser's list bans"),
    MetricSpec("peerd_audits_total", "counter", "Microbatches of mates computed again, and cases, by what came of them", ("outcome",)),
    MetricSpec("peerd_audit_kept_bytes", "gauge", "Memory of tensors kept so that others can audit this daemon's calls"),
    MetricSpec("peerd_convicted_peers", "gauge", "Peers that have lost their standing by audits"),
    MetricSpec("peerd_texts", "gauge", "Texts of those who ask the model that this daemon keeps"),
    MetricSpec("peerd_text_bytes", "gauge", "Memory of these texts"),
    MetricSpec("peerd_evaluated_copy_bytes", "gauge", "Memory of the copy of the evaluated step's parameters, with which texts go on"),
    MetricSpec("peerd_text_tokens_total", "counter", "Tokens computed for those who ask the model, prompts included"),
    MetricSpec("peerd_text_seconds_total", "counter", "Time the compute thread spent on these tokens"),
    MetricSpec("peerd_text_training_waits_seconds_total", "counter", "How much of this time work of training waited"),
    MetricSpec("peerd_asking", "gauge", "Texts that this daemon's own user asks the swarm for now"),
    MetricSpec("peerd_unwelcome_calls_total", "counter", "Calls refused because the organiser does not let their callers take part"),
    MetricSpec("peerd_phase_seconds_total", "counter", "Time in each phase of a step; averaging is the all-reduce", ("phase",)),
    MetricSpec("peerd_executor_busy_seconds_total", "counter", "Time the compute thread spent on forward and backward passes"),
    MetricSpec(
        "peerd_activity_seconds_total",
        "counter",
        "Time in each activity that `peerd trace` shows, summed over microbatches",
        ("activity",),
    ),
    MetricSpec("peerd_averages_total", "counter", "Averages this daemon applied"),
    MetricSpec("peerd_local_batch", "gauge", "Microbatches behind each of a peer's own updates within a step; 0: steps are not local"),
    MetricSpec("peerd_own_updates_total", "counter", "Updates of this daemon's own parameters within steps, where steps are local"),
    MetricSpec("peerd_rounds_failed_total", "counter", "Averaging rounds that did not come together"),
    MetricSpec("peerd_group_sums_total", "counter", "Sums of groups made in rounds, where the stage is larger than a group"),
    MetricSpec("peerd_average_sections_total", "counter", "Sections of averages made in rounds of one holder of each group's sum"),
    MetricSpec("peerd_bytes_total", "counter", "RPC payload, tensors and messages alike", ("direction",)),
    MetricSpec(
        "peerd_tensor_bytes_total",
        "counter",
        "Bytes of tensors and files as they travelled, by the role of the peer at the other end",
        ("tensor", "codec", "peer_role", "direction"),
    ),
    MetricSpec("peerd_boundary_bytes_total", "counter", "RPC payload sent over stage boundaries"),
    MetricSpec("peerd_boundary_crossings_total", "counter", "Activations sent over a stage boundary"),
    MetricSpec("peerd_microbatches_accumulated_total", "counter", "Microbatches added to this daemon's accumulator"),
    MetricSpec("peerd_microbatch_calls_total", "counter", "Calls of microbatches that this daemon made, also of the same one again"),
    MetricSpec("peerd_microbatches_replayed_total", "counter", "Microbatches sent again after a first try failed"),
    MetricSpec("peerd_microbatches_suppressed_total", "counter", "Microbatches recognised as already held and not added"),
    MetricSpec("peerd_microbatches_duplicate_total", "counter", "Microbatches counted twice in an applied average; must stay 0"),
    MetricSpec("peerd_microbatches_lost_total", "counter", "Microbatches missing from an applied average; must stay 0"),
    MetricSpec("peerd_inexact_steps_total", "counter", "Steps of this stage that were given up"),
    MetricSpec("peerd_ledger_resets_total", "counter", "Times this daemon dropped its ledger or a part of it"),
    MetricSpec("peerd_reloads_total", "counter", "Times this daemon downloaded its stage's state again"),
    MetricSpec("peerd_faults_seen_total", "counter", "Peers this daemon came to suspect"),
    MetricSpec("peerd_messages_refused_total", "counter", "Broken messages from other peers"),
    MetricSpec("peerd_calls_put_off_total", "counter", "Calls of other peers that had too many open"),
    MetricSpec("peerd_internal_errors_total", "counter", "Bugs that showed in this daemon; its log has a traceback of each"),
    MetricSpec("peerd_files_unwritten", "gauge", "Kinds of files that this daemon could not write lately, such as checkpoints"),
    MetricSpec("peerd_moves_total", "counter", "Times rebalancing took this daemon to another stage"),
    MetricSpec("peerd_p2pd_restarts_total", "counter", "Times the networking process was rebuilt"),
    MetricSpec("peerd_join_seconds", "gauge", "From having chosen the stage to serving it, download included; 0 until it serves"),
    MetricSpec("peerd_open_files", "gauge", "Files and sockets that the daemon's process has open"),
    MetricSpec("peerd_open_files_limit", "gauge", "The most that the system lets it have"),
    MetricSpec("peerd_memory_resident_bytes", "gauge", "Memory of the daemon's process"),
    MetricSpec("peerd_memory_device_bytes", "gauge", "Memory of the GPU held by the daemon; 0 on a CPU"),
    MetricSpec("peerd_device_memory_bytes", "gauge", "Memory of the device: the GPU's, or the machine's where that computes"),
    MetricSpec("peerd_device_memory_used_bytes", "gauge", "How much of it is in use, by anybody"),
    MetricSpec("peerd_memory_available_bytes", "gauge", "What the device had to give when the daemon started"),
    MetricSpec("peerd_device_utilisation_ratio", "gauge", "How busy the device is, with anybody's work; absent where it does not tell"),
    MetricSpec("peerd_cpu_seconds_total", "counter", "Processor time of the daemon's process, all cores"),
    MetricSpec("peerd_event_loop_lag_seconds", "gauge", "By how much the event loop was late at worst in the last minute"),
    MetricSpec(
        "peerd_event_loop_lag_quantile_seconds",
        "gauge",
        "The event loop's lateness in the last five minutes, by the share of its calls that were no later",
        ("share",),
    ),
    MetricSpec("peerd_health_items", "gauge", "What the user should know, by how serious it is", ("severity",)),
)


class _Readings(Collector):
    def __init__(self, read: Callable[[], Mapping[str, MetricSource]]) -> None:
        self._read = read
        self._failed: set[str] = set()
        """Metrics whose sensor has failed, each of which the log tells once."""

    def describe(self) -> Iterator[Metric]:
        """Return no metrics, so that registering this collector does not read the values."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        sources = self._read()
        for metric in METRICS:
            value = self._value(metric.name, sources.get(metric.name))
            if value is not None:
                yield _family(metric, value)

    def _value(self, name: str, source: MetricSource) -> Reading | None:
        if not callable(source):
            return source
        try:
            return source()
        except Exception as error:  # the edge of what the platform tells: a broken sensor costs its own metric
            if name not in self._failed:
                self._failed.add(name)
                LOG.warning("a sensor failed", metric=name, error=repr(error))
            return None


def _family(metric: MetricSpec, reading: Reading) -> Metric:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.text, labels=metric.labels)
    if not isinstance(reading, Mapping):
        reading = {(): reading}
    for labels, value in reading.items():
        family.add_metric([labels] if isinstance(labels, str) else list(labels), value)
    return family


def scraper(read: Callable[[], Mapping[str, MetricSource]]) -> Callable[[], bytes]:
    """A function that returns the text of a scrape, from a registry of its own."""
    registry = CollectorRegistry()
    registry.register(_Readings(read))
    return lambda: generate_latest(registry)
