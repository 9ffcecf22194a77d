"""The hook by which a daemon that allows faults runs a liar from outside the tree."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerd.background import INTERNAL_ERRORS
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.control.client import ControlClient
from peerd.control.server import control_server
from peerd.daemon.liars import Liars, load
from peerd.daemon.peer import Peer
from peerd.daemon.run import harmful_verbs
from peerd.errors import UsageError

LIARS = Path(__file__).parents[2] / "scripts" / "benchmarks" / "_liars"


def ask(peer: object, **request: Any) -> None:
    async def asked() -> None:
        await Liars(cast(Peer, peer)).lie({"verb": "lie", **request}, cast(Any, None))
        await asyncio.sleep(0)

    asyncio.run(asked())


def test_a_liar_from_a_file_runs_with_the_daemons_peer_and_its_arguments(tmp_path: Path) -> None:
    module, told = tmp_path / "mine.py", list[Any]()
    module.write_text("async def lie(peer, arguments):\n    peer.append(dict(arguments))\n", encoding="utf-8")
    ask(told, module=str(module), many=3)
    assert told == [{"many": 3}]


@pytest.mark.parametrize("verb", ["fault", "lie"])
async def test_a_daemon_that_allows_no_faults_refuses_with_one_error_and_loads_nothing(verb: str, tmp_path: Path) -> None:
    module, loaded, errors = tmp_path / "mine.py", tmp_path / "loaded", INTERNAL_ERRORS.count
    module.write_text(f"open({str(loaded)!r}, 'w')", encoding="utf-8")
    peer = cast(Peer, SimpleNamespace(settings=Settings(home=str(tmp_path))))
    with tempfile.TemporaryDirectory(prefix="peerd-t-", dir="/tmp") as folder:
        home = Home(Path(folder))
        home.control_socket.parent.mkdir()
        async with control_server(home.control_socket, harmful_verbs(peer)):
            with pytest.raises(UsageError, match=f"this daemon does not obey the verb {verb}") as refusal:
                await asyncio.to_thread(partial(ControlClient(home).request, verb, module=str(module), kind="kill"))
    assert "allow_faults" in refusal.value.remedy
    assert not loaded.exists()
    assert INTERNAL_ERRORS.count == errors


@pytest.mark.parametrize("name", sorted(path.stem for path in LIARS.glob("[a-z]*.py")))
def test_the_liars_of_the_bench_can_be_loaded_by_file_and_by_name(name: str) -> None:
    assert callable(load(f"scripts.benchmarks._liars.{name}"))
    assert callable(load(str(LIARS / f"{name}.py")))


@pytest.mark.parametrize("name", [None, "", 3, "no.such.module", "/no/such/file.py", "json", "peerd.table.record"])
def test_what_is_no_liar_is_refused_with_a_reason(name: object) -> None:
    with pytest.raises(UsageError, match="module"):
        load(name)


def test_a_module_that_fails_to_load_ends_no_daemon(tmp_path: Path) -> None:
    module = tmp_path / "broken.py"
    module.write_text("1 / 0", encoding="utf-8")
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        load(str(module))
