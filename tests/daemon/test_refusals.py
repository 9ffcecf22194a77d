"""What stands in a daemon's way before it reaches the network: one line that says what to do, and the exit code for it."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from peerd.cli.launch import module_command
from peerd.config.manifest import dump
from peerd.config.organiser import create_key
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.daemon.__main__ import main
from peerd.errors import ERROR_PREFIX, ExitCode
from peerd.swarm.identity import lock_home
from tests.tiny_run import tiny_manifest

SOMEBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEXTUXiqjRrCJRZ1AJuwYtJ7E1hENCwDBAFpVVjKpVHJd"
Refuse = Callable[[Settings, ExitCode, str], None]


@pytest.fixture
def home() -> Iterator[Home]:
    folder = Path(tempfile.mkdtemp(prefix="peerd-t-", dir="/tmp"))
    yield Home(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def refuse(capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Asserts that a daemon with these settings ends with the code, one line with these words, and nothing else."""

    def run(settings: Settings, code: ExitCode, words: str) -> None:
        assert main([settings.to_json()]) == code
        out, err = capfd.readouterr()
        assert out == ""
        errors = [line for line in err.splitlines() if line.startswith(ERROR_PREFIX)]
        assert len(errors) == 1, err
        assert words in errors[0]
        assert "Traceback" not in err
        assert not Home(Path(settings.home)).run_folder.exists()

    return run


def joining(home: Home, **changes: object) -> Settings:
    return replace(Settings(home=str(home.folder), join=SOMEBODY), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"incarnation": 1}', '{"incarnation": "x", "organisers": {}}'])
def test_a_damaged_state_file_is_told(home: Home, refuse: Refuse, content: str) -> None:
    home.state.write_text(content)
    refuse(joining(home), ExitCode.DISK, "is damaged; delete it")


@pytest.mark.parametrize("content", [b"", b"not a key", b"\x08\x01\x12\x40" + bytes(10), bytes(68)])
def test_a_damaged_identity_is_told(home: Home, refuse: Refuse, content: bytes) -> None:
    home.identity.write_bytes(content)
    refuse(joining(home), ExitCode.SIGNATURE, "is not an identity key; move it away")


def test_a_refusal_ends_no_process_for_a_thread_that_was_there_before(home: Home, refuse: Refuse) -> None:
    ends = threading.Event()
    other = threading.Thread(target=ends.wait)
    other.start()
    try:
        home.state.write_text("{")
        refuse(joining(home), ExitCode.DISK, "is damaged; delete it")
    finally:
        ends.set()
        other.join()


@pytest.mark.parametrize("device", ["cuda:77", "tpu", "meta", "mps:3"])
def test_a_device_that_is_not_here_is_told(home: Home, refuse: Refuse, device: str) -> None:
    refuse(joining(home, device=device), ExitCode.USAGE, "--device")


@pytest.mark.parametrize("address", ["nonsense", "/ip4/127.0.0.1/tcp/9", SOMEBODY + "#run"])
def test_an_address_that_is_none_is_told(home: Home, refuse: Refuse, address: str) -> None:
    refuse(joining(home, join=address), ExitCode.ADDRESS, "paste the whole line")


def test_a_taken_port_is_told(home: Home, refuse: Refuse) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refuse(joining(home, port=taken.getsockname()[1]), ExitCode.PORT_TAKEN, "choose another one with --port")


def test_a_home_in_use_is_told(home: Home, refuse: Refuse) -> None:
    lock = lock_home(home)
    try:
        refuse(joining(home), ExitCode.IDENTITY_IN_USE, "peerd leave")
    finally:
        lock.release()


def test_a_home_that_cannot_be_made_is_told(home: Home, refuse: Refuse) -> None:
    home.folder.joinpath("file").touch()
    refuse(joining(Home(home.folder / "file" / "home")), ExitCode.DISK, "--home")


def test_an_organiser_needs_its_run_file_and_its_key(home: Home, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.folder / "cache"))
    run_file = home.folder / "run.toml"
    settings = joining(home, join="", run_file=str(run_file))
    refuse(settings, ExitCode.MANIFEST, "no such file")
    manifest = tiny_manifest()
    run_file.write_text(dump(replace(manifest, data=replace(manifest.data, source=__file__))))
    refuse(settings, ExitCode.SIGNATURE, "organiser.key")
    create_key(home.folder / "organiser.key")
    (home.folder / "organiser.key").write_text("junk")
    refuse(settings, ExitCode.SIGNATURE, "is not an organiser's key")


def test_text_that_cannot_be_trained_on_is_told(home: Home, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.folder / "cache"))
    run_file, manifest = home.folder / "run.toml", tiny_manifest()
    create_key(home.folder / "organiser.key")
    (home.folder / "text.txt").write_text("short")
    for source, words in (("nowhere", "no such file"), ("text.txt", "too few")):
        run_file.write_text(dump(replace(manifest, data=replace(manifest.data, source=source))))
        refuse(joining(home, join="", run_file=str(run_file)), ExitCode.MANIFEST, words)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "junk", '{"home": "/tmp/x", "join": "a", "odd": 1}', '{"home": "h", "join": "a", "port": -1}']
)
def test_settings_that_are_none_are_told(capfd: pytest.CaptureFixture[str], text: str) -> None:
    assert main([text]) == ExitCode.USAGE
    assert capfd.readouterr().err.startswith(ERROR_PREFIX + "bad settings")


def test_who_waits_for_an_address_ends_when_nobody_is_there_to_tell_it(
    home: Home, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main([joining(home, join="", join_told=True).to_json()]) == ExitCode.INTERRUPTED
    assert capfd.readouterr() == ("", "")


def test_an_address_that_is_told_is_read_like_any_other(
    home: Home, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("nowhere\n"))
    assert main([joining(home, join="", join_told=True).to_json()]) == ExitCode.ADDRESS
    assert "nowhere" in capfd.readouterr().err


def test_a_full_disk_is_told_and_leaves_no_half_an_identity(home: Home) -> None:
    """No file may hold more than 40 bytes; standard error is a pipe."""
    settings = joining(Home(home.folder / "home"))
    done = subprocess.run(
        ["prlimit", "--fsize=40", *module_command("peerd.daemon", settings.to_json())],
        env={**os.environ, "XDG_CACHE_HOME": str(home.folder / "cache")}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == ExitCode.DISK, done.stderr
    assert done.stderr.startswith(ERROR_PREFIX)
    assert done.stderr.count("\n") == 1
    assert not Home(home.folder / "home").identity.exists()


@pytest.mark.parametrize("most", [32, 64])
def test_too_few_open_files_are_told_with_the_number_that_is_needed(home: Home, most: int) -> None:
    done = subprocess.run(
        ["prlimit", f"--nofile={most}:{most}", *module_command("peerd.daemon", joining(home).to_json())],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == ExitCode.LIMIT, done.stderr
    needed = "this peer needs 80 open files at least, 16 more for each other peer"
    assert done.stderr.startswith(f"{ERROR_PREFIX}{needed}, and the limit is {most}; raise it, `ulimit -n 1024`")
    assert done.stderr.count("\n") == 1


def test_the_limit_of_open_files_is_raised_as_far_as_the_system_lets_it_and_stays_for_children(tmp_path: Path) -> None:
    raises = "from peerd.daemon.open_files import raise_limit; print(raise_limit(), flush=True)"
    child = "import subprocess; subprocess.run(['bash', '-c', 'ulimit -Sn'], check=True)"
    command = ["prlimit", "--nofile=100:300", sys.executable, "-c", f"{raises}; {child}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["300", "300"]
