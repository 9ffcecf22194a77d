"""Every metric is documented, and every name that dashboards and alert rules use is a metric."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from peerd.observe.metrics import METRICS, Reading, scraper

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "peerd" / "docs" / "metrics.md"
BOARD = ROOT / "deploy" / "grafana" / "peerd.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
NAMES = {metric.name for metric in METRICS}


def reading_of(labels: tuple[str, ...]) -> Reading:
    return {tuple(f"{label}-{k}" for label in labels): float(k) for k in range(2)} if labels else 7.0


def named(text: str) -> set[str]:
    return set(re.findall(r"\bpeerd_[a-z_]+", text))


def panels() -> Iterator[dict[str, Any]]:
    yield from json.loads(BOARD.read_text())["panels"]


def test_a_scrape_gives_every_metric_under_its_name_with_its_labels() -> None:
    text = scraper(lambda: {metric.name: reading_of(metric.labels) for metric in METRICS})().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.name for sample in samples} == NAMES
    by_name = {metric.name: metric for metric in METRICS}
    assert all(set(sample.labels) == set(by_name[sample.name].labels) for sample in samples)


def test_what_is_not_known_yet_is_left_out() -> None:
    text = scraper(lambda: {"peerd_step": 3, "peerd_loss": None})()
    assert b"peerd_step" in text
    assert b"peerd_loss" not in text


def test_a_sensor_that_fails_costs_its_own_metric_and_no_other() -> None:
    def utilisation() -> float:
        raise OSError("not supported")

    scrape = scraper(lambda: {"peerd_step": 3, "peerd_device_utilisation_ratio": utilisation, "peerd_memory_resident_bytes": lambda: 7.0})
    for _ in range(2):
        text = scrape()
        assert b"peerd_step 3.0" in text
        assert b"peerd_memory_resident_bytes 7.0" in text
        assert b"peerd_device_utilisation_ratio" not in text


def test_each_scrape_reads_anew() -> None:
    steps = iter([1.0, 2.0])
    scrape = scraper(lambda: {"peerd_step": next(steps)})
    assert b"peerd_step 1.0" in scrape()
    assert b"peerd_step 2.0" in scrape()


def test_names_say_what_they_count() -> None:
    assert [m.name for m in METRICS if (m.kind == "counter") != m.name.endswith("_total")] == []
    assert len(NAMES) == len(METRICS)


def test_the_page_lists_every_metric_as_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+?) \| ?(.*?) ?\|$", PAGE.read_text(), re.MULTILINE)
    told = [(name, kind, text, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, text, labels in rows]
    assert told == [(m.name, m.kind, m.text, m.labels) for m in METRICS]


def test_the_grafana_board_names_only_metrics_and_every_panel_has_title_unit_and_meaning() -> None:
    used = set()
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        used |= named(" ".join(target["expr"] for target in panel["targets"]))
    assert len(used) > 15
    assert used - NAMES == set()


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in panels()
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_alert_rules_load_name_only_metrics_and_say_what_to_do() -> None:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        assert named(rule["expr"]) - NAMES == set()
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_prometheus_loads_the_rules_from_beside_its_own_file() -> None:
    config = yaml.safe_load((ALERTS.parent / "prometheus.yml").read_text())
    assert [(ALERTS.parent / name).exists() for name in config["rule_files"]] == [True]
    assert {job["job_name"] for job in config["scrape_configs"]} == set(re.findall(r'job="(\w+)"', ALERTS.read_text()))
