"""`peerd invite` and `peerd ban`: what they sign, where they keep it, and to whom they hand it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peerd.cli.volunteer import invitation_told
from peerd.config.access import LIST_FILE, NO_END, AccessList, invitations_in, invited_until, list_on_disk, read_list
from peerd.config.manifest import load, run_id
from peerd.config.organiser import KEY_FILE, load_key, public_bytes
from peerd.config.paths import Home
from peerd.errors import UsageError
from peerd.link.peer_keys import peer_id_of
from tests.cli.conftest import Command, Outcome
from tests.control.fake_daemon import serving

PEERS = [peer_id_of(bytes([number]) * 32) for number in range(4)]


@pytest.fixture
def run(peerd: Command, tmp_path: Path) -> Path:
    """The folder of a run by invitation."""
    assert peerd("new", tmp_path / "run").code == 0
    text = (tmp_path / "run" / "run.toml").read_text()
    (tmp_path / "run" / "run.toml").write_text(text.replace('access = "open"', 'access = "invited"'))
    return tmp_path / "run"


def key_of(folder: Path) -> bytes:
    return public_bytes(load_key(folder / KEY_FILE))


def id_of(folder: Path) -> str:
    return run_id(key_of(folder), load(folder / "run.toml").name)


def kept(folder: Path) -> AccessList | None:
    found = list_on_disk(folder / LIST_FILE, id_of(folder), key_of(folder))
    return found[1] if found else None


def of(done: Outcome) -> dict[str, Any]:
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


class Daemon:
    """Has a list, and takes the ones that it is told."""

    def __init__(self, folder: Path, run: str = "") -> None:
        self.told: list[str] = []
        self._folder, self._run = folder, run or id_of(folder)

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        assert request["verb"] == "access"
        if "list" in request:
            self.told.append(request["list"])
        listed = self.told[-1] if self.told else ""
        return {"ok": {"schema": 1, "peer": PEERS[3], "run": self._run, "organiser": str(self._folder), "list": listed}}

    def list(self, number: int = -1) -> AccessList:
        packed = bytes.fromhex(self.told[number])
        return read_list((packed[64:], packed[:64]), self._run, key_of(self._folder))


def test_invitations_are_for_the_peers_that_are_named(peerd: Command, run: Path) -> None:
    done = peerd("invite", *PEERS[:2], "--days", "2", "--run", run)
    assert done.code == 0, done.err
    assert done.err == ""
    for peer, line in zip(PEERS, done.out.splitlines(), strict=False):
        (invitation,) = invitations_in(line)
        until_s = invited_until(invitation, peer, id_of(run), key_of(run))
        assert until_s is not None
        assert 0 < 2 * 86400 - (until_s - time.time()) < 60
    reply = of(peerd("invite", PEERS[0], "--days", "0", "--run", run / "run.toml", "--json"))
    (invitation,) = invitations_in(reply["invitations"][0]["invitation"])
    assert invited_until(invitation, PEERS[0], id_of(run), key_of(run)) == reply["until"] == NO_END
    assert kept(run) is None


def test_of_an_open_run_it_says_that_everybody_may_join(peerd: Command, tmp_path: Path) -> None:
    assert peerd("new", tmp_path / "open").code == 0
    assert "this run is open to everybody" in peerd("invite", PEERS[0], "--run", tmp_path / "open").err


def test_bans_are_signed_with_rising_numbers_and_kept_beside_the_key(peerd: Command, run: Path) -> None:
    assert peerd("ban", "--run", run).out == "there is no list yet\n"
    done = peerd("ban", *PEERS[:2], "--reason", "sends noise", "--run", run)
    assert done.out.splitlines()[0] == "list 1: 0 allowed, 2 banned"
    assert f"  banned   {PEERS[0]}  sends noise" in done.out
    assert "no daemon of this home is in the run" in done.err
    assert kept(run) == AccessList(1, frozenset(), {PEERS[0]: "sends noise", PEERS[1]: "sends noise"})
    assert of(peerd("invite", PEERS[1], "--list", "--run", run, "--json"))["allowed"] == [PEERS[1]]
    assert of(peerd("ban", "--lift", PEERS[0], "--run", run, "--json"))["banned"] == []
    assert kept(run) == AccessList(3, frozenset([PEERS[1]]), {})
    assert of(peerd("ban", "--run", run, "--json"))["number"] == 3


def test_a_list_is_handed_to_the_daemon_of_this_home_and_builds_on_the_newest(
    peerd: Command, run: Path, short_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(run)
    monkeypatch.chdir(tmp_path)
    with serving(Home(short_home), daemon):
        assert of(peerd("ban", PEERS[0], "--json"))["daemons"] == 1, "the daemon knows where the key is"
        (run / LIST_FILE).unlink()
        assert of(peerd("ban", PEERS[1], "--json"))["number"] == 2, "the daemon has the list before"
        refused = peerd("ban", PEERS[3])
        assert refused.code == 2
        assert f"{PEERS[3]} is the daemon of this home" in refused.err
    assert [daemon.list(number).number for number in (0, 1)] == [1, 2]
    assert daemon.list().banned == {PEERS[0]: "", PEERS[1]: ""}
    assert kept(run) == daemon.list()


def test_a_daemon_of_another_run_hears_nothing(peerd: Command, run: Path, short_home: Path) -> None:
    daemon = Daemon(run, run="b" * 32)
    with serving(Home(short_home), daemon):
        assert of(peerd("ban", PEERS[0], "--run", run, "--json"))["daemons"] == 0
    assert daemon.told == []


def nothing(_run: Path) -> None: ...


def damaged(run: Path) -> None:
    (run / LIST_FILE).write_bytes(b"junk")


def without_key(run: Path) -> None:
    (run / KEY_FILE).unlink()


@pytest.mark.parametrize(
    ("arguments", "spoil", "code", "words"),
    [
        (["invite", "12D3KooW"], nothing, 2, "12D3KooW: not a peer id"),
        (["ban", PEERS[0] + "x"], nothing, 2, "not a peer id"),
        (["ban", PEERS[0], "--lift", "--reason", "x"], nothing, 2, "--lift takes peers and no --reason"),
        (["ban", "--lift"], nothing, 2, "--lift takes peers"),
        (["ban", "--reason", "x"], nothing, 2, "--reason is for the peers that are banned"),
        (["ban", PEERS[0], "--reason", "x" * 121], nothing, 2, "a reason is a printable text of at most 120 characters"),
        (["ban", PEERS[0]], damaged, 4, "bring back a copy of it, or remove it"),
        (["ban", PEERS[0]], without_key, 4, "organiser.key: no such file"),
        (["invite", PEERS[0]], without_key, 4, "organiser.key: no such file"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    peerd: Command, run: Path, arguments: list[str], spoil: Callable[[Path], None], code: int, words: str
) -> None:
    spoil(run)
    done = peerd(*arguments, "--run", run)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("peerd: error: ")
    assert done.err.count("\n") == 1
    assert words in done.err


def test_without_a_run_it_asks_for_one(peerd: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "name the run's folder with --run" in peerd("ban", PEERS[0]).err


def test_the_organisers_own_key_cannot_be_banned(peerd: Command, run: Path) -> None:
    done = peerd("ban", peer_id_of(key_of(run)), "--run", run)
    assert done.code == 2
    assert "a list cannot ban the organiser's own key" in done.err
    assert kept(run) is None


def test_an_invitation_is_given_as_text_or_in_a_file(peerd: Command, run: Path, tmp_path: Path) -> None:
    text = peerd("invite", *PEERS, "--run", run).out
    file = tmp_path / "invitation"
    file.write_text("Welcome!\n" + text)
    assert invitations_in(invitation_told(str(file))) == invitations_in(invitation_told(text)) == invitations_in(text)
    assert len(invitations_in(text)) == len(PEERS)
    assert invitation_told("") == ""
    for wrong in ("nowhere", str(tmp_path), text[:50], "x" * 5000, "~nobody/x"):
        with pytest.raises(UsageError, match="neither a file with an invitation nor one itself"):
            invitation_told(wrong)
