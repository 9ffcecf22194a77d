"""Scalars reach their sinks, and a failing sink affects only itself."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from peerd.observe.sinks import MAX_WAITING, Row, Sinks, TensorBoard, WeightsAndBiases

ROWS: list[Row] = [(step, 1.8e9 + step, {"loss": 5.0 - step, "swarm/peers": 3}) for step in range(5)]


class Kept:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.closed = False

    def write(self, row: Row) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.closed = True


class Failing(Kept):
    def write(self, row: Row) -> None:
        if row[0] >= 2:
            raise SystemExit("this library gives up")


def test_every_row_comes_in_order_before_it_is_closed() -> None:
    kept = Kept()
    sinks = Sinks({"kept": lambda: kept})
    for row in ROWS:
        sinks.note(row)
    sinks.close()
    assert kept.rows == ROWS
    assert kept.closed


def test_a_sink_that_fails_is_told_of_once_and_the_others_go_on() -> None:
    kept = Kept()

    def missing() -> Kept:
        raise ModuleNotFoundError("no such library")

    with capture_logs() as logs:
        sinks = Sinks({"missing": missing, "failing": Failing, "kept": lambda: kept})
        for row in ROWS:
            sinks.note(row)
        sinks.close()
    assert kept.rows == ROWS
    assert [(entry["sink"], entry["log_level"]) for entry in logs] == [("missing", "warning"), ("failing", "warning")]


def test_a_sink_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerd.observe.sinks.CLOSE_WITHIN_S", 0.2)
    hangs = threading.Event()

    class Hanging(Kept):
        def write(self, row: Row) -> None:
            hangs.wait(20)

    sinks = Sinks({"hanging": Hanging})
    began_s = time.monotonic()
    for step in range(2 * MAX_WAITING):
        sinks.note((step, 0.0, {}))
    sinks.close()
    assert time.monotonic() - began_s < 10
    hangs.set()


def test_tensorboard_can_read_what_was_written(tmp_path: Path) -> None:
    sinks = Sinks({"TensorBoard": lambda: TensorBoard(tmp_path)})
    for row in ROWS:
        sinks.note(row)
    sinks.close()
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("events.out.tfevents.")
    assert scalars_in(file) == [(row[0], name, pytest.approx(value)) for row in ROWS for name, value in row[2].items()]


def scalars_in(file: Path) -> list[Any]:
    """The scalars of a TFRecord file. A record is a length of 8 bytes, its checksum of 4, the event, and the event's checksum of 4."""
    from tensorboardX.proto import event_pb2

    data, at, found = file.read_bytes(), 0, []
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        at += size + 16
    return found


def test_without_a_key_weights_and_biases_is_refused_before_it_could_ask_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match="WANDB_API_KEY"):
        WeightsAndBiases("project", tmp_path, {"peer": "a", "run": "r"})


def test_weights_and_biases_keeps_a_run_on_disk_where_it_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="an extra of its own: pip install 'peerd[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with capture_logs() as logs:
        sinks = Sinks({"W&B": lambda: WeightsAndBiases("project", tmp_path, {"peer": "12D3KooWabcdefgh", "run": "r"})})
        for row in ROWS:
            sinks.note(row)
        sinks.close()
    assert logs == []
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"swarm/peers" in file.read_bytes()
