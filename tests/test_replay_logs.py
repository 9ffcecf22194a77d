"""Logs of moves as they lie on disks: cut off, repeated, not enough, and played by the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peerd.child import main
from peerd.config.manifest import Manifest, WireConfig
from peerd.errors import ExitCode, UsageError
from peerd.reference import replay_reference
from peerd.replay import Move, path_of, read_log
from peerd.stage.moves import MoveLog
from peerd.table.record import Lineage, PeerId, PeerRecord
from tests.test_reference import request, write_run
from tests.test_replay import LOCAL, Text
from tests.tiny_run import real_text, replace_train, tiny_manifest


def test_what_a_kill_has_cut_off_is_left_out_and_another_file_is_refused(tmp_path: Path) -> None:
    log = MoveLog(PeerRecord(peer=PeerId("me"), stage=1), tmp_path)
    name = log.seal(PeerRecord(peer=PeerId("me"), stage=1, step=3), PeerId("0"))
    (path,) = tmp_path.iterdir()
    with path.open("a") as file:
        file.write('{"move": "se')
    moves = read_log(path)
    assert [move["move"] for move in moves] == ["serve", "begin", "seal"]
    assert bytes.fromhex(moves[-1]["id"]) == name
    path.write_text("anything\n")
    with pytest.raises(UsageError, match="no log of a peer's moves"):
        read_log(path)
    with pytest.raises(UsageError, match="no log of a peer's moves"):
        read_log(tmp_path / "nothing")


def applied(step: int, before: str, after: str) -> Move:
    return {"move": "apply", "step": step, "lineage": before, "after": after, "computed": {"a": "0x1"}}


def test_of_steps_that_a_run_repeated_after_it_went_back_those_count_that_lead_on() -> None:
    logs = [
        [{"move": "serve", "peer": "a", "stage": 0}, applied(0, "", "a"), applied(1, "a", "b"), applied(0, "", "c"), applied(1, "c", "d")],
        [{"move": "serve", "peer": "b", "stage": 0}, applied(0, "", "a"), applied(2, "d", "e")],
        [{"move": "serve", "peer": "c", "stage": 1}, applied(2, "b", "x")],
    ]
    assert [each.after for each in path_of(logs, 0, range(3))] == ["c", "d", "e"]
    assert [each.after for each in path_of(logs[:1], 0, range(1, 2))] == ["d"]
    with pytest.raises(UsageError, match="no log says which average stage 1 applied at step 1"):
        path_of(logs, 1, range(3))


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (tiny_manifest(2), "the run has no local steps"),
        (replace(LOCAL, wire=WireConfig(weight_gradients="sparse:64")), "cannot play lossy averages"),
        (LOCAL, "no log says which average stage 0 applied at step 0"),
    ],
)
def test_what_cannot_be_computed_again_is_refused_in_one_sentence(manifest: Manifest, words: str) -> None:
    logs: list[list[Move]] = [[{"move": "serve", "peer": "a", "stage": 0}]]
    with pytest.raises(UsageError, match=words):
        replay_reference(manifest, Text(manifest), 1, logs)


def test_the_command_plays_what_peers_have_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_bytes(real_text().read_bytes())
    run_file = write_run(tmp_path, LOCAL, "text.txt")
    assert main(["peerd.reference", request(run_file, tmp_path / "a", replay=str(tmp_path / "moves"))]) == ExitCode.USAGE
    assert "no log of a peer's moves lies in" in capsys.readouterr().err
    (tmp_path / "moves").mkdir()
    for stage in range(2):
        mine = PeerRecord(peer=PeerId(f"p{stage}"), stage=stage, done=0xFFF)
        log = MoveLog(mine, tmp_path / "moves")
        for _ in range(2):
            for index in range(12):
                log.add(mine, index, PeerId("0"), [b"", b""])
            log.seal(mine, PeerId("0"))
            log.give(mine)
            after = Lineage(0, mine.lineage.chain + b"x")
            log.apply(mine, after, {mine.peer: mine.done})
            mine = replace(mine, step=mine.step + 1, lineage=after)
    assert main(["peerd.reference", request(run_file, tmp_path / "a", replay=str(tmp_path / "moves"))]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    whole = write_run(tmp_path, replace_train(LOCAL, local_batch=12), "text.txt")
    assert main(["peerd.reference", request(whole, tmp_path / "b")]) == ExitCode.OK
    found, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in "ab")
    assert all(torch.equal(found[name], value) for name, value in expected.items()), "one update of a whole step"
