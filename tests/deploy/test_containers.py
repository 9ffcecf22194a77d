"""The container image and what runs it: every path is there, every command exists, and a stop leaves time to drain."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import check
from tests.deploy.test_units import number_in

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
CUDA: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())
KUBERNETES: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "peerd.yaml").read_text()))
PROMETHEUS: dict[str, Any] = yaml.safe_load((DEPLOY / "docker" / "prometheus.yml").read_text())
DAEMONS = ("bootstrap", "peer")
EVERYWHERE = "0.0.0.0"  # noqa: S104 - inside a container
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW"


def instructions(name: str) -> list[str]:
    """The arguments of each instruction of that name, continued lines joined."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE.replace("\\\n", ""), re.MULTILINE)


def flag(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def seconds(value: str) -> float:
    assert value.endswith("s")
    return float(value[:-1])


def test_hadolint_finds_nothing_wrong() -> None:
    tool = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([tool, DEPLOY / "Dockerfile"], check=False, capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0


def test_the_image_has_a_target_for_each_kind_of_machine_and_cpu_is_the_default() -> None:
    targets = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert {"cpu", "cuda"} <= set(targets)
    assert targets[-1] == "cpu"


def test_the_image_runs_as_nobody_in_particular() -> None:
    assert instructions("USER") == ["10001:10001"]
    assert DOCKERFILE.index("\nUSER ") < DOCKERFILE.index("\nENTRYPOINT ")


def test_every_installation_keeps_to_the_pinned_versions() -> None:
    installations = [run for run in instructions("RUN") if "pip install" in run]
    assert len(installations) == 4  # of each build: PyTorch, then peerd with the rest
    for run in installations:
        assert "pip install --constraint scripts/constraints.txt " in run
    assert [run.endswith(" .") for run in installations] == [False, True] * 2


def test_builders_of_stable_distributions_know_the_flags_of_the_healthcheck() -> None:
    """Buildah and Podman of Debian 12 refuse a file with --start-interval, and Docker before 25 does too."""
    (line,) = instructions("HEALTHCHECK")
    assert set(re.findall(r"--([a-z-]+)=", line.partition("CMD")[0])) <= {"interval", "timeout", "start-period", "retries"}


@pytest.mark.parametrize("page", ["install.md", "deploy.md"])
def test_the_pages_build_and_use_the_image_that_the_file_makes(page: str) -> None:
    text = (ROOT / "peerd" / "docs" / page).read_text()
    builds = re.findall(r"(?:docker|podman|buildah) (?:build|bud) [^`\n]*", text)
    assert builds
    for build in builds:
        words = shlex.split(build)
        assert flag(words, "--file") == "deploy/Dockerfile"
        assert f" AS {flag(words, '--target')}" in DOCKERFILE
        assert flag(words, "--tag") == COMPOSE["x-peerd"]["image"]
        if words[0] != "docker":
            assert flag(words, "--format") == "docker"  # their own format has no HEALTHCHECK


def test_the_pages_run_the_image_with_its_volume_its_port_and_time_to_stop() -> None:
    image = COMPOSE["x-peerd"]["image"]
    runs = re.findall(r"docker run ([^`\n]*)", (ROOT / "peerd" / "docs" / "deploy.md").read_text())
    assert len(runs) == 2
    for run in runs:
        before, after = run.split(f"{image} ")
        options, arguments = shlex.split(before), shlex.split(after)
        check([ADDRESS if word == "ADDRESS" else word for word in arguments])
        if "--detach" in options:
            assert flag(options, "--volume").split(":")[1:] == instructions("VOLUME")
            assert float(flag(options, "--stop-timeout")) > number_in("peerd/daemon/departure.py", "STANDSTILL_S") + 10
            assert flag(options, "--publish").split(":") == [flag(arguments, "--port")] * 2


def test_whatever_is_copied_is_there_and_not_ignored() -> None:
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignore[0] == "*"
    let_through = [line[1:] for line in ignore if line.startswith("!")]
    for copied in instructions("COPY"):
        words = [word for word in copied.split() if not word.startswith("--")]
        for source in [] if "--from=" in copied else words[:-1]:
            assert (ROOT / source).exists(), source
            assert any(source == each or source.startswith(f"{each}/") for each in let_through), source


def test_the_image_is_healthy_while_its_daemon_answers() -> None:
    (line,) = instructions("HEALTHCHECK")
    program, *arguments = json.loads(line.partition("CMD ")[2])
    assert program == "peerd"
    check(arguments)


@pytest.mark.parametrize("name", DAEMONS)
def test_each_service_starts_a_command_that_exists(name: str) -> None:
    service = COMPOSE["services"][name]
    script = (DEPLOY / "docker" / service["entrypoint"][0]).read_text()
    (line,) = re.findall(r"^exec peerd (.*)$", script, re.MULTILINE)
    words = [word for word in shlex.split(line.replace('"$@"', "@ARGUMENTS")) if not word.startswith(">")]
    arguments: list[str] = []
    for word in words:
        if word == "@ARGUMENTS":
            arguments += service["command"]
        else:
            arguments.append({"$run": "my-run", "$join": ADDRESS}.get(word, word))
    check(arguments)


def test_the_run_of_a_compose_swarm_is_made_by_flags_that_exist() -> None:
    default = re.fullmatch(r"\$\{PEERD_NEW:-(.*)\}", COMPOSE["services"]["bootstrap"]["environment"]["PEERD_NEW"])
    assert default
    check(["new", "my-run", *default[1].split()])


@pytest.mark.parametrize("name", DAEMONS)
def test_each_service_is_confined_and_has_time_to_drain(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert seconds(service["stop_grace_period"]) > number_in("peerd/daemon/departure.py", "STANDSTILL_S") + 10


def test_compose_mounts_only_what_is_there() -> None:
    """The folders grafana/ and prometheus/ come with the metrics."""
    mounted = [volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service.get("volumes", ())]
    for source in mounted:
        if source.startswith("./"):
            folder = DEPLOY / Path(source).parts[0]
            assert (DEPLOY / source).exists() or not folder.exists(), source
        else:
            assert source in COMPOSE["volumes"], source


def test_only_this_machine_reaches_a_compose_swarm_unless_told_otherwise() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert published
    for port in published:
        assert port.startswith(("127.0.0.1:", "${PEERD_HOST:-127.0.0.1}:")), port


def test_prometheus_scrapes_every_daemon_where_it_serves_its_metrics() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert found["names"] == list(DAEMONS)
    for name in DAEMONS:
        command = COMPOSE["services"][name]["command"]
        assert flag(command, "--dashboard-port") == str(found["port"])
        assert flag(command, "--dashboard-host") == EVERYWHERE


def test_the_gpu_file_changes_services_that_exist() -> None:
    assert set(CUDA["services"]) == set(DAEMONS)
    for service in CUDA["services"].values():
        assert service["build"]["target"] == "cuda"


def workloads() -> list[dict[str, Any]]:
    return [document for document in KUBERNETES if "template" in document["spec"]]


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("workload", workloads(), ids=lambda workload: workload["metadata"]["name"])
def test_kubernetes_starts_and_probes_with_commands_that_exist(workload: dict[str, Any]) -> None:
    container = container_of(workload)
    check([ADDRESS if argument == "$(PEERD_ADDRESS)" else argument for argument in container["args"]])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        program, *arguments = container[probe]["exec"]["command"]
        assert program == "peerd"
        check(arguments)


@pytest.mark.parametrize("workload", workloads(), ids=lambda workload: workload["metadata"]["name"])
def test_a_pod_is_confined_and_has_time_to_drain(workload: dict[str, Any]) -> None:
    pod, container = workload["spec"]["template"]["spec"], container_of(workload)
    assert pod["terminationGracePeriodSeconds"] > number_in("peerd/daemon/departure.py", "STANDSTILL_S") + 10
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert str(pod["securityContext"]["runAsUser"]) == instructions("USER")[0].split(":")[0]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("workload", workloads(), ids=lambda workload: workload["metadata"]["name"])
def test_selectors_choose_the_pods_and_mounts_have_their_volumes(workload: dict[str, Any]) -> None:
    spec = workload["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
    assert {mount["name"] for mount in container_of(workload)["volumeMounts"]} == volumes
    ports = {str(port["containerPort"]) for port in container_of(workload)["ports"]}
    assert {flag(container_of(workload)["args"], "--port"), flag(container_of(workload)["args"], "--dashboard-port")} == ports
    assert spec["template"]["metadata"]["annotations"]["prometheus.io/port"] in ports


def test_the_service_leads_to_the_bootstrap_peer() -> None:
    (service,) = [document for document in KUBERNETES if document["kind"] == "Service"]
    (bootstrap,) = [document for document in workloads() if document["kind"] == "StatefulSet"]
    assert bootstrap["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= bootstrap["spec"]["template"]["metadata"]["labels"].items()
    assert {port["port"] for port in service["spec"]["ports"]} == {port["containerPort"] for port in container_of(bootstrap)["ports"]}


@pytest.fixture
def told(tmp_path: Path) -> dict[str, str]:
    """An environment in which `peerd` writes down how it was called, and makes what `peerd new` makes."""
    tool = tmp_path / "bin" / "peerd"
    tool.parent.mkdir()
    made = 'if [ "$1" = new ]; then mkdir -p "$2" && touch "$2/run.toml"; echo made; fi'
    tool.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n{made}\nif [ "$1" = start ]; then echo \'{{"join": "{ADDRESS}"}}\'; fi\n')
    tool.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tool.parent}:{os.environ['PATH']}",
        "PEERD_RUN": str(tmp_path / "run"),
        "PEERD_ADDRESS_FOLDER": str(tmp_path),
    }


def run_script(name: str, *arguments: str, env: dict[str, str]) -> list[str]:
    subprocess.run([DEPLOY / "docker" / name, *arguments], check=True, env=env, timeout=60, capture_output=True)
    return (Path(env["PEERD_ADDRESS_FOLDER"]) / "calls").read_text().splitlines()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_bootstrap_container_makes_its_run_once_and_the_peers_find_it(told: dict[str, str]) -> None:
    run = told["PEERD_RUN"]
    calls = run_script("bootstrap", "--port", "1", env={**told, "PEERD_NEW": "--stages 2 --name x"})
    assert calls == [f"new {run} --stages 2 --name x", f"start {run} --json --port 1"]
    calls = run_script("bootstrap", "--port", "1", env=told)
    assert calls[2:] == [f"start {run} --json --port 1"]
    calls = run_script("peer", "--host", EVERYWHERE, env=told)
    assert calls[3:] == [f"join {ADDRESS} --host {EVERYWHERE}"]
    calls = run_script("peer", env={**told, "PEERD_ADDRESS": "/elsewhere"})
    assert calls[4:] == ["join /elsewhere"]
