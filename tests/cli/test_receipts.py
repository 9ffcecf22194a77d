"""`peerd contributions --receipt` and `peerd verify-receipt`: what they write, what they print, and why a receipt is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from peerd.config.paths import Home
from peerd.policy.step.accounts import EVERY
from tests.cli.conftest import Command
from tests.control.fake_daemon import serving
from tests.observe.account_daemons import RUN, Daemon, anchor, days, train


@pytest.fixture
def daemons(tmp_path: Path) -> list[Daemon]:
    found = [Daemon(tmp_path, name) for name in "abc"]
    days(found, 3)
    return found


@pytest.fixture
def files(daemons: list[Daemon], tmp_path: Path) -> dict[str, Path]:
    """The receipts of one daemon: all of its work, and its last day; and another daemon's."""
    told = {"all": daemons[0].receipt(), "day": daemons[0].receipt(2 * 86_400), "other": daemons[1].receipt()}
    for name, raw in told.items():
        (tmp_path / name).write_bytes(raw)
    return {name: tmp_path / name for name in told}


def test_a_receipt_is_written_as_the_daemon_told_it(peerd: Command, short_home: Path, tmp_path: Path, daemons: list[Daemon]) -> None:
    raw, asked = daemons[0].receipt(), []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return {"ok": {"schema": 1, "receipt": base64.b64encode(raw).decode()}}

    with serving(Home(short_home), answer):
        done = peerd("contributions", "--receipt", tmp_path / "work", "--days", "1.5")
        assert peerd("contributions", "--receipt", tmp_path).code == 10
    assert (done.code, done.err) == (0, "")
    assert (tmp_path / "work").read_bytes() == raw
    assert f"{len(raw):,} bytes" in done.out
    assert (asked[0]["verb"], asked[0]["last_s"], asked[1]["last_s"]) == ("receipt", 129_600, 0)


def test_what_a_receipt_proves_is_printed(peerd: Command, files: dict[str, Path]) -> None:
    done = peerd("verify-receipt", files["all"])
    assert (done.code, done.err) == (0, "")
    assert f"({RUN})" in done.out
    assert "stage 0, steps 0 to 47" in done.out
    assert "in 48 averages" in done.out
    assert "signed by 2 of 3 signers" in done.out
    assert "that its signers are the run's peers is their own word" in done.out
    assert "Not audited" in done.out
    (told,) = json.loads(peerd("verify-receipt", files["day"], "--json").out)["receipts"]
    (stage,) = told["stages"]
    assert (stage["first_step"], stage["last_step"], stage["steps"], stage["known"], told["trust"]) == (32, 47, 16, False, "off")


def test_accounts_that_this_homes_daemon_keeps_are_known(
    peerd: Command, short_home: Path, daemons: list[Daemon], files: dict[str, Path]
) -> None:
    with daemons[1].store() as store:
        kept = [stored.signed.account for stored in store.of_stage(0)]
    reply = {"schema": 1, "run": RUN, "accounts": [{"stage": 0, "step": each.step, "id": each.id.hex()} for each in kept]}
    with serving(Home(short_home), lambda request: {"ok": reply} if request["verb"] == "accounts" else {}):
        assert "their own word" not in peerd("verify-receipt", files["all"]).out
    assert "their own word" not in peerd("verify-receipt", files["all"], "--anchor", kept[0].id.hex()).out
    assert peerd("verify-receipt", files["all"], "--anchor", "xyz").code == 2


def test_a_chain_through_an_account_that_the_organiser_has_signed_needs_no_other_word(
    peerd: Command, daemons: list[Daemon], tmp_path: Path
) -> None:
    anchor(daemons[0])
    (tmp_path / "signed").write_bytes(daemons[0].receipt())
    told = peerd("verify-receipt", tmp_path / "signed").out
    assert "its signers are peers of the run" in told
    assert "their own word" not in told
    ((stage,),) = [each["stages"] for each in json.loads(peerd("verify-receipt", tmp_path / "signed", "--json").out)["receipts"]]
    assert (stage["known"], stage["organiser"]) == (True, True)


def test_receipts_are_added_up_and_none_is_counted_twice(peerd: Command, files: dict[str, Path], tmp_path: Path) -> None:
    done = peerd("verify-receipt", files["day"], files["other"])
    assert done.code == 0
    assert "together: " in done.out
    done = peerd("verify-receipt", files["all"], files["day"])
    assert (done.code, done.out) == (4, "")
    assert "both tell of steps 32 to 47 of stage 0: work counts once" in done.err
    assert peerd("verify-receipt", files["all"], files["all"]).code == 4


def test_what_is_wrong_is_refused_with_its_reason(peerd: Command, files: dict[str, Path], tmp_path: Path) -> None:
    raw = bytearray(files["all"].read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / "changed").write_bytes(raw)
    for arguments, words in (
        ([tmp_path / "changed"], "changed: this receipt proves nothing: it was changed after its peer had signed it"),
        ([files["all"], "--run", "b" * 32], f"it is of another run, {RUN}"),
    ):
        done = peerd("verify-receipt", *arguments)
        assert (done.code, done.out) == (4, "")
        assert words in done.err
    assert peerd("verify-receipt", tmp_path / "absent").code == 10
    assert peerd("contributions", "--days", "1").code == 2
    assert peerd("contributions", "--share", "--receipt", "x").code == 2


def test_a_receipt_that_was_signed_at_no_time_is_refused(peerd: Command, tmp_path: Path) -> None:
    liar = Daemon(tmp_path, "liar")
    train([liar], range(EVERY), time_s=1 << 60)
    (tmp_path / "receipt").write_bytes(liar.receipt())
    done = peerd("verify-receipt", tmp_path / "receipt")
    assert done.code == 4
    assert "proves nothing" in done.err
