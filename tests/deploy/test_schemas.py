"""What the tools that will read these files say of them: their own schemas, parsers and linters."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from compose_spec import PyCompose

from peerd.observe.metrics import METRICS, scraper
from tests.observe.test_metrics import BOARD, panels, reading_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import kubernetes_validate
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
KUBERNETES_VERSION = "1.31"
PROMTOOL, CLOUD_INIT = shutil.which("promtool"), shutil.which("cloud-init")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, as in Debian's package prometheus")


def as_compose_reads_it(name: str) -> str:
    """Variables at their defaults, merge keys merged."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / name).read_text())
    return yaml.safe_dump({key: value for key, value in yaml.safe_load(text).items() if not key.startswith("x-")})


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_compose_files_are_what_the_compose_specification_says(name: str) -> None:
    services = PyCompose.from_yaml(as_compose_reads_it(name)).to_spec().services
    assert services is not None
    assert {"bootstrap", "peer"} <= set(services)


def test_a_misspelled_key_of_a_service_would_be_found() -> None:
    with pytest.raises(ValueError, match="stop_grace_perod"):
        PyCompose.from_yaml(as_compose_reads_it("compose.yaml").replace("stop_grace_period", "stop_grace_perod", 1))


def test_kubernetes_takes_every_document_and_knows_every_field() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "peerd.yaml").read_text()))
    assert len(documents) == 3
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    documents[1]["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(documents[1], KUBERNETES_VERSION, strict=True)


def after_grafana(board: dict[str, Any]) -> dict[str, Any]:
    """What is left of a dashboard when Grafana's own types have read it: a key they do not know is gone."""
    register_default_plugins()
    told: dict[str, Any] = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    return told


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Where the second is not the first, and what the second has besides is no matter."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after[key], f"{path}/{key}") if key in after else [f"{path}/{key}"]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}/{index}")
    elif before != after:
        yield path


def test_grafana_knows_every_key_of_the_board() -> None:
    board = json.loads(BOARD.read_text())
    assert list(lost(board, after_grafana(board))) == []
    board["panels"][5]["fieldConfig"]["defaults"]["custom"]["lineWith"] = 3
    assert list(lost(board, after_grafana(board))) == ["/panels/5/fieldConfig/defaults/custom/lineWith"]


def test_every_query_of_board_and_alerts_is_promql() -> None:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    queries += [rule["expr"] for group in groups for rule in group["rules"]]
    for query in queries:
        promql_parser.parse(query)
    with pytest.raises(ValueError, match="unclosed"):
        promql_parser.parse(queries[0] + "(")


def run(*command: str | Path, told: str = "") -> None:
    done = subprocess.run(command, input=told, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_has_nothing_to_say_of_names_rules_and_configuration(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    run(PROMTOOL, "check", "metrics", told=scraper(lambda: {metric.name: reading_of(metric.labels) for metric in METRICS})().decode())
    run(PROMTOOL, "check", "config", PROMETHEUS / "prometheus.yml")
    for name in (DEPLOY / "docker" / "prometheus.yml", PROMETHEUS / "alerts.yml"):
        shutil.copy(name, tmp_path)  # as the containers mount them
    run(PROMTOOL, "check", "config", tmp_path / "prometheus.yml")


@needs_promtool
def test_each_alert_goes_off_when_it_should_and_a_healthy_run_is_quiet() -> None:
    assert PROMTOOL is not None
    run(PROMTOOL, "test", "rules", PROMETHEUS / "alerts.test.yml")


def test_every_alert_is_tried_both_ways() -> None:
    alerts = {rule["alert"] for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]}
    quiet, loud = yaml.safe_load((PROMETHEUS / "alerts.test.yml").read_text())["tests"]
    assert {case["alertname"] for case in quiet["alert_rule_test"] if "exp_alerts" not in case} == alerts
    assert {case["alertname"] for case in loud["alert_rule_test"] if case["exp_alerts"]} == alerts


@pytest.mark.skipif(CLOUD_INIT is None, reason="needs cloud-init")
def test_cloud_init_takes_the_user_data() -> None:
    assert CLOUD_INIT is not None
    run(CLOUD_INIT, "schema", "--config-file", DEPLOY / "cloud-init" / "spot.yaml")
