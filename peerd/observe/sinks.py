"""Scalars of each finished step, for TensorBoard and Weights & Biases. A separate thread writes them.

A sink that fails is logged once and dropped; the event loop never waits for one. Its library is loaded with its first scalar.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import structlog

from peerd.peer_names import short_id

MAX_WAITING = 1000
"""Number of steps queued for a slow sink; further ones are dropped."""
CLOSE_WITHIN_S = 10.0
LOG = structlog.get_logger()
Row = tuple[int, float, Mapping[str, float]]
"""A step, the wall clock of its end, and its scalars by name."""


class Sink(Protocol):
    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def write(self, row: Row) -> None:
        step, time_s, scalars = row
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step, time_s)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases, or in `folder` with WANDB_MODE=offline. Its environment variables configure the rest."""

    def __init__(self, project: str, folder: Path, about: Mapping[str, Any]) -> None:
        if not (os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY") or (Path.home() / ".netrc").exists()):
            # Without a key wandb would ask for one on the terminal.
            raise ValueError("no key: set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline")
        import wandb

        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project, dir=str(folder), name=short_id(about["peer"]), group=about["run"], config=dict(about), settings=settings
        )

    def write(self, row: Row) -> None:
        step, _, scalars = row
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class Sinks:
    """Accepts rows from the event loop without blocking it."""

    def __init__(self, makers: Mapping[str, Callable[[], Sink]]) -> None:
        """`makers` create the sinks, by name, on the sinks' thread."""
        self._makers = dict(makers)
        self._rows: queue.Queue[Row | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name="sinks", daemon=True)
        self._thread.start()

    def note(self, row: Row) -> None:
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(row)

    def close(self) -> None:
        """Write the remaining rows, within CLOSE_WITHIN_S."""
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=CLOSE_WITHIN_S)
        self._thread.join(CLOSE_WITHIN_S)

    def _work(self) -> None:
        sinks: dict[str, Sink] = {}
        while (row := self._rows.get()) is not None:
            for name, maker in self._makers.items():
                self._try(name, lambda name=name, maker=maker, row=row: _write(sinks, name, maker, row))  # type: ignore[misc]
            self._makers = {name: maker for name, maker in self._makers.items() if name in sinks}
        for name, sink in sinks.items():
            self._try(name, sink.close)

    def _try(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # the libraries may even raise SystemExit; training continues without the sink
            LOG.warning("a sink failed and gets no more scalars", sink=name, error=f"{type(error).__name__}: {error}"[:300])


def _write(sinks: dict[str, Sink], name: str, maker: Callable[[], Sink], row: Row) -> None:
    sink = sinks.pop(name, None) or maker()
    sink.write(row)
    sinks[name] = sink
