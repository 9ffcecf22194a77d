"""Imports point one way: daemon -> rooms -> policy -> table, and cli -> the control socket's client. Each edge has its reason."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Leaves that every room may use: the error tree, the version, how a process answers a command, how it serves HTTP, how peers are called,
# and copies to and from a GPU.
LEAVES = {"background", "child", "errors", "http_server", "peer_names", "served_time", "transfers", "unwritten", "__version__", "SCHEMA"}

# Where parts are put together into a process: these may import every room but the client's.
COMPOSITION_ROOTS = {
    "checkup",
    "costs",
    "daemon",
    "equality",
    "generate",
    "intake",
    "reference",
    "repartition",
    "replay",
    "replicas",
    "serve_api",
    "swarm_model",
}

# What each room imports besides itself and the leaves, and why. Read downwards: no room imports one that stands below it.
ALLOWED: dict[str, dict[str, str]] = {
    "table": {},
    "timeline": {},
    "generated": {},
    "policy": {"table": "decisions are functions of the view"},
    "config": {
        "policy": "what the owner allows is what the governor judges by",
        "table": "a step has no more microbatches than a ledger has room for",
    },
    "data": {"config": "which text, which tokenizer, where the cache is"},
    "planner": {"config": "what is trained and how it is cut", "policy": "how long a round may take, and who sends what in it"},
    "models": {
        "config": "a model is built from its manifest",
        "planner": "where it is cut, and what its parts cost",
        "policy": "what its stages send is what a line needs",
    },
    "link": {
        "config": "codecs are counted by name, and the sockets' folder is a path of the home",
        "generated": "relays and direct connections are asked for in messages of their own",
        "policy": "which way is faster, whom a relay takes",
        "table": "a link leads to a peer",
    },
    "wire": {
        "config": "bounds of messages follow from the manifest",
        "generated": "messages are protobuf's",
        "link": "messages travel over links",
        "policy": "rosters and ledgers travel, and a call is routed by the wiring policy",
        "table": "records travel",
        "timeline": "what was sent and received is noted, and told to who asks",
    },
    "swarm": {
        "config": "the manifest is published and pinned",
        "link": "the directory is libp2p's",
        "policy": "how news spreads and who is suspected are policies",
        "table": "it keeps the view fresh",
        "wire": "gossip is a call",
    },
    "stage": {
        "config": "what to compute, in how many threads",
        "link": "a link's rates decide its codec",
        "models": "the module it runs",
        "policy": "ledger and stepping",
        "swarm": "it reads the view and announces what it holds",
        "table": "records and phases",
        "timeline": "passes and phases are noted",
        "wire": "it serves calls and hands on to the next stage",
    },
    "averaging": {
        "config": "precision of the sums",
        "link": "chunks of a slice",
        "policy": "rosters and codecs",
        "stage": "it averages the stage's accumulator",
        "table": "records and phases",
        "timeline": "exchanges are noted",
        "wire": "slices are sent and received",
    },
    "step": {
        "averaging": "it opens and closes rounds",
        "config": "the rules' numbers",
        "planner": "how many averages are as many bytes as a state",
        "policy": "it does what the rules decide",
        "stage": "it commits and reloads the stage's state",
        "swarm": "it reads the view",
        "table": "records and phases",
    },
    "audit": {
        "config": "the precision decides how far two machines may be apart",
        "models": "it computes with the stage's module",
        "policy": "it does what the rules of audits decide",
        "stage": "it computes what mates have computed",
        "swarm": "it uses the swarm's clock",
        "table": "peers and lineages",
        "wire": "it asks for tensors, and tells cases",
    },
    "train": {
        "config": "which seed, how large a microbatch",
        "data": "microbatches are windows of the token file",
        "link": "chunks of a file",
        "models": "a list of blocks makes its own samples",
        "policy": "which microbatches to launch",
        "swarm": "who is there",
        "table": "records",
        "wire": "microbatches are sent",
    },
    "asking": {
        "config": "the manifest says what stages take and give",
        "models": "where the stages are cut",
        "policy": "which path a text takes",
        "table": "peers",
        "wire": "it asks peers to go on with texts",
    },
    "api": {},
    "control": {"config": "where the socket lies"},
    "owner": {
        "config": "limits and where they are kept",
        "control": "pause, resume and limits are verbs",
        "link": "caps are kept where bytes pass",
        "policy": "the governor judges",
    },
    "observe": {
        "config": "accounts are kept in the form in which a receipt has them",
        "policy": "rosters say who computed what",
        "table": "the view is what it watches",
        "timeline": "spans go to OpenTelemetry",
    },
    "sim": {
        "planner": "it runs what a plan foretells, on the same network",
        "policy": "it drives the daemon's own decisions",
        "table": "they decide on views and records",
        "timeline": "simulated peers note what they did as daemons do",
    },
    "cli": {
        "config": "homes, settings, run files",
        "control": "the socket's client",
        "data": "what `peerd new` finds out about text and tokenizer",
        "planner": "what a new run costs its volunteers",
        "policy": "what a receipt proves",
        "sim": "simulating needs no daemon: it runs in the client's own process",
        "table": "a receipt names its run by its id",
        "timeline": "a timeline is written and summed up where it was asked for",
    },
}

# What the folders of policy/ import from one another.
WITHIN_POLICY: dict[str, set[str]] = {
    "hashing": set(),
    "inference": set(),
    "owner": set(),
    "round": set(),
    "step": {"hashing", "round"},
    "route": {"hashing", "step"},
    "swarm": {"hashing", "owner", "round", "step"},
}

# Modules of the control room that the thin client may load.
CLIENT_SIDE = {f"peerd.control.{name}" for name in ("asking", "audits", "client", "contributions", "protocol", "reach", "states", "texts")}

# Libraries that only these rooms may import: they are slow to load, or belong to one room's craft.
HEAVY: dict[str, set[str]] = {
    "torch": {"models", "wire", "stage", "averaging", "asking", "audit", "owner", "train", "transfers", "daemon", "reference"},
    "transformers": {"models"},
    "hivemind": {"link"},
    "grpc": {"link", "wire", "daemon"},
    "rich": {"cli"},
    "textual": {"cli"},
    "click": {"cli"},
    "matplotlib": {"sim"},
    "prometheus_client": {"observe"},
    "starlette": {"api", "http_server", "observe"},
    "uvicorn": {"api", "http_server", "observe"},
    "sqlite3": {"observe"},
    "tokenizers": {"data"},
    "pyarrow": {"data"},
    "opentelemetry": {"observe"},
    "tensorboardX": {"observe"},
    "wandb": {"observe"},
}

PURE = {"table", "policy"}
STDLIB_ONLY = PURE | {"timeline"}


@dataclass(frozen=True, slots=True)
class Import:
    importer: str
    imported: str
    line: int

    @property
    def room(self) -> str:
        return room_of(self.importer)


def room_of(module: str) -> str:
    """`peerd.stage.state` is in the room `stage`; a composition root inside a room counts by its own name."""
    inside = module.removeprefix("peerd.")
    return inside if inside in COMPOSITION_ROOTS else inside.split(".")[0]


@functools.cache
def all_imports() -> tuple[Import, ...]:
    found = []
    for path in sorted((ROOT / "peerd").rglob("*.py")):
        if "generated" in path.parts:
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found += [Import(module, name, node.lineno) for name in imported_by(node)]  # type: ignore[attr-defined]
    return tuple(found)


def imported_by(node: ast.AST) -> list[str]:
    """Modules named by an import statement; `from peerd.wire import x` may name the module peerd.wire.x."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        if node.module.startswith("peerd"):
            return [f"{node.module}.{alias.name}" if is_package(node.module) else node.module for alias in node.names]
        return [node.module]
    return []


def is_package(module: str) -> bool:
    return ROOT.joinpath(*module.split(".")).is_dir()


def told(imports: list[Import]) -> list[str]:
    return [f"{entry.importer}:{entry.line} imports {entry.imported}" for entry in imports]


def test_every_room_has_its_line_in_the_table() -> None:
    rooms = {path.name for path in (ROOT / "peerd").iterdir() if (path / "__init__.py").exists()}
    assert rooms - COMPOSITION_ROOTS == set(ALLOWED)


def test_rooms_import_only_what_the_table_allows() -> None:
    def allowed(entry: Import) -> bool:
        target = room_of(entry.imported)
        if not entry.imported.startswith("peerd.") or target in LEAVES or target == entry.room:
            return True
        if entry.room in COMPOSITION_ROOTS:
            return target != "cli"
        return target in ALLOWED.get(entry.room, {})

    assert told([entry for entry in all_imports() if not allowed(entry)]) == []


def test_the_table_allows_what_is_used_and_no_more() -> None:
    used = {(entry.room, room_of(entry.imported)) for entry in all_imports() if entry.imported.startswith("peerd.")}
    unused = [f"{room} -> {target}" for room, targets in ALLOWED.items() for target in targets if (room, target) not in used]
    assert unused == []


def test_the_folders_of_policy_point_one_way() -> None:
    edges = {
        (entry.importer.split(".")[2], entry.imported.split(".")[2])
        for entry in all_imports()
        if entry.room == "policy" and entry.imported.startswith("peerd.policy.")
    }
    assert {(source, target) for source, target in edges if source != target} == {
        (source, target) for source, targets in WITHIN_POLICY.items() for target in targets
    }


def test_the_table_itself_points_one_way() -> None:
    order = list(ALLOWED)
    for room, targets in ALLOWED.items():
        for target in targets:
            assert order.index(target) < order.index(room), f"{room} -> {target}"


@pytest.mark.parametrize("room", sorted(STDLIB_ONLY))
def test_the_core_needs_nothing_but_the_standard_library(room: str) -> None:
    foreign = [
        entry
        for entry in all_imports()
        if entry.room == room and entry.imported.split(".")[0] not in sys.stdlib_module_names and not entry.imported.startswith("peerd.")
    ]
    assert told(foreign) == []


def test_the_core_reads_no_clock_draws_no_chance_and_does_no_input_or_output() -> None:
    impure = {"time", "random", "secrets", "os", "io", "socket", "asyncio", "threading", "subprocess", "pathlib", "logging", "datetime"}
    found = [entry for entry in all_imports() if entry.room in PURE and entry.imported.split(".")[0] in impure]
    assert told(found) == []


@pytest.mark.parametrize("library", sorted(HEAVY))
def test_heavy_libraries_stay_in_their_rooms(library: str) -> None:
    rooms = HEAVY[library] | COMPOSITION_ROOTS - {"daemon"} if library in ("torch", "hivemind", "grpc") else HEAVY[library]
    found = [entry for entry in all_imports() if entry.imported.split(".")[0] == library and entry.room not in rooms]
    assert told(found) == []


def test_the_client_loads_only_the_sockets_client_and_protocol() -> None:
    found = [
        entry
        for entry in all_imports()
        if entry.room == "cli" and room_of(entry.imported) == "control" and not entry.imported.startswith(tuple(CLIENT_SIDE))
    ]
    assert told(found) == []


def test_the_clients_side_of_the_control_room_stays_light() -> None:
    light = LEAVES - {"background", "child", "http_server"} | {"config", "control"}
    found = [
        entry
        for entry in all_imports()
        if entry.importer in CLIENT_SIDE
        and (entry.imported.split(".")[0] not in sys.stdlib_module_names)
        and not (entry.imported.startswith("peerd.") and room_of(entry.imported) in light)
    ]
    assert told(found) == []


def test_a_baseline_of_a_benchmark_loads_nothing_that_a_fork_would_break() -> None:
    """hivemind's servers fork; gRPC does not bear it, and the wire puts an empty package in hivemind's place."""
    code = "import sys, scripts.benchmarks._workers; print(sorted({'grpc', 'hivemind', 'peerd.wire'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
