"""Time to loss on home links: which boundary, codec, averages and optimizer an organiser should choose for a line.

Two parts are put together. How much the loss falls with each update comes from real training in one process: a small decoder learns the
standard library's sources with the run's own codecs, boundary, optimizer and local steps, and with two peers a stage whose averages lose
what the run's codec loses, with error feedback. All rows see equal data; seeds see different texts. How long an update takes comes from
peerd's own policies in virtual time, as in `peerd simulate run`, for a run of home size: 8 stages of some 130 million parameters, two peers
each, on devices of 20 TFLOP/s whose lines have the link's rate each way. A narrow boundary has the same share of the width at both sizes.

So the table assumes that a row needs as many more updates than another at home size as at the small size. It leaves out the optimizer's
time, deaths, and that averages and microbatches share a line. `auto` has the codec that the policy chooses for the link at home size, down
to top-k; the averages of that row are in int8. The target is the loss that the dense row has after a share of its updates (--target).
"time" is until a row gets there, by linear interpolation between evaluations, and a dash if it does not. "loss" is what a row ends with.

Results of trainings are appended to the file that --state names, and are not computed again: stop it, and go on with the same command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from peerd.config.manifest import ComputeConfig, DataConfig, Manifest, TrainConfig
from peerd.config.paths import cache_folder
from peerd.data.sources import STDLIB
from peerd.data.tokens import prepare_tokens
from peerd.models.stages import StageModule, build_stage
from peerd.reference import backpropagate, evaluate, train_reference
from peerd.stage.optimizer import Optimizer
from peerd.stage.update import apply_sums
from peerd.train.corpus import Corpus
from scripts.benchmarks._race import LINKS, LOCAL_UPDATES, NUM_REPLICAS, ROWS, HomeSize, Link, Row, update_s
from scripts.benchmarks._report import SCHEMA, progress, run
from scripts.benchmarks.convergence import Group, Method

MARKS = 16
"""Evaluations of each training, at equal distances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The training. All its fields are part of a result's key."""

    d_model: int
    layers: int
    stages: int
    sequences: int
    sequence_length: int
    updates: int
    rate: float
    muon_rate: float
    tokenizer: str

    def manifest(self, row: Row, seed: int) -> Manifest:
        """Two microbatches an update, one of each peer."""
        steps = self.updates // row.updates_per_step
        train = TrainConfig(
            num_stages=self.stages,
            microbatches_per_step=NUM_REPLICAS * row.updates_per_step,
            microbatch_size=self.sequences,
            sequence_length=self.sequence_length,
            optimizer=row.optimizer,
            learning_rate=self.muon_rate if row.optimizer == "muon" else self.rate,
            warmup_steps=0 if row.is_local else min(20, self.updates // 5),
            steps=steps,
            evaluate_every_steps=max(1, steps // MARKS),
            evaluation_microbatches=16,
            local_batch=1 if row.is_local else 0,
        )
        vocabulary = 256 if self.tokenizer == "bytes" else int(self.tokenizer.partition(":")[2])
        model = row.model(self.d_model, num_layers=self.layers, num_heads=4, vocab_size=vocabulary)
        data = DataConfig(source=STDLIB, tokenizer=self.tokenizer, evaluation_fraction=0.05)
        return Manifest(seed=seed, model=model, data=data, train=train, compute=ComputeConfig(threads=1), wire=row.wire)


@dataclass(frozen=True, slots=True)
class Cell:
    """One training. `row` has no `auto`: its codecs are those of a link."""

    row: Row
    seed: int


Losses = list[tuple[int, float]]
"""Evaluation losses, with the updates before each."""


def train(size: Size, cell: Cell) -> Losses:
    manifest = size.manifest(cell.row, cell.seed)
    corpus = Corpus(prepare_tokens(STDLIB, cache_folder(), manifest.data), manifest)
    if cell.row.is_local or cell.row.averages == "none":
        found = train_reference(manifest, corpus, manifest.train.steps, num_replicas=NUM_REPLICAS if cell.row.is_local else 1).evaluations
        return [(each.step * cell.row.updates_per_step, each.loss) for each in found]
    torch.set_num_threads(1)
    return list(_with_lossy_averages(manifest, corpus))


def _with_lossy_averages(manifest: Manifest, corpus: Corpus) -> Iterator[tuple[int, float]]:
    """A synchronous run in which two peers of each stage average as a round does it."""
    steps, every = manifest.train.steps, manifest.train.evaluate_every_steps
    stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]
    optimizers = [Optimizer(manifest, dict(stage.named_parameters())) for stage in stages]
    method = Method(weights=manifest.wire.weight_gradients)
    groups = [Group([parameter.shape for parameter in stage.parameters()], method) for stage in stages]
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            yield step, evaluate(manifest, corpus, stages, step).loss
        if step == steps:
            return
        by_peer = [_gradients(stages, manifest, corpus, step, peer) for peer in range(NUM_REPLICAS)]
        for number, (stage, optimizer, group) in enumerate(zip(stages, optimizers, groups, strict=True)):
            mean = group.average(step, [of_peer[number] for of_peer in by_peer]) / NUM_REPLICAS
            pieces = torch.split(mean[:-1], [parameter.numel() for parameter in stage.parameters()])
            named = {name: piece.view_as(value) for (name, value), piece in zip(stage.named_parameters(), pieces, strict=True)}
            apply_sums(manifest.train, optimizer, step, named, 1, None)


def _gradients(stages: Sequence[StageModule], manifest: Manifest, corpus: Corpus, step: int, peer: int) -> list[Tensor]:
    """One vector for each stage, with the loss at its end."""
    loss = backpropagate(stages, *corpus.microbatch(step, peer), manifest.wire, manifest.train)
    found = []
    for stage in stages:
        parts = [torch.zeros_like(value) if value.grad is None else value.grad for value in stage.parameters()]
        found.append(torch.cat([*(part.flatten() for part in parts), torch.tensor([loss])]))
        stage.zero_grad()
    return found


def reaches_at(losses: Losses, target: float) -> float:
    """Updates until the loss is at the target; infinite if it never is."""
    if losses[0][1] <= target:
        return losses[0][0]
    for (before, higher), (after, lower) in pairwise(losses):
        if lower <= target:
            return before + (after - before) * (higher - target) / (higher - lower)
    return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row on one link. Times in seconds; None: it never gets there, or was not trained."""

    link: str
    row: str
    codec: str
    update_s: float
    loss: float | None
    """At the end, mean of the seeds."""
    spread: float | None
    """Of the seeds' losses at the end."""
    updates: float | None
    """Until the target, mean of the seeds."""
    time_s: float | None
    sooner_than_int8: float | None


def lines_on(link: Link, home: HomeSize, rows: Sequence[str], known: dict[Cell, Losses], seeds: int, share: float) -> list[Line]:
    targets = {}
    for seed in range(seeds):
        dense = known.get(Cell(ROWS["dense float32"], seed))
        if dense:
            targets[seed] = min(loss for updates, loss in dense if updates <= share * dense[-1][0])
    lines = []
    for name in rows:
        row = home.on(ROWS[name], link)
        runs = {seed: known[Cell(row, seed)] for seed in targets if Cell(row, seed) in known}
        ends = [losses[-1][1] for losses in runs.values()]
        reached = [reaches_at(losses, targets[seed]) for seed, losses in runs.items()]
        updates = statistics.fmean(reached) if reached and all(map(math.isfinite, reached)) else None
        each_s = update_s(home, ROWS[name], link)
        lines.append(
            Line(
                link=link.name,
                row=name,
                codec=row.codec,
                update_s=each_s,
                loss=statistics.fmean(ends) if ends else None,
                spread=max(ends) - min(ends) if ends else None,
                updates=updates,
                time_s=None if updates is None else updates * each_s,
                sooner_than_int8=None,
            )
        )
    base = next((line.time_s for line in lines if line.row == "int8"), None)
    return [dataclasses.replace(line, sooner_than_int8=base / line.time_s) if base is not None and line.time_s else line for line in lines]


def show(lines: Sequence[Line]) -> None:
    def told(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    print(f"\n{lines[0].link}")
    print(f"{'row':<16} {'codec':<9} {'s an update':>11} {'loss':>7} {'spread':>7} {'updates':>8} {'time, h':>8} {'to int8':>8}")
    for line in lines:
        hours = None if line.time_s is None else line.time_s / 3600
        print(
            f"{line.row:<16} {line.codec:<9} {line.update_s:>11.2f} {told(line.loss, '.4f'):>7} {told(line.spread, '.4f'):>7}"
            f" {told(line.updates, '.0f'):>8} {told(hours, '.2f'):>8} {told(line.sooner_than_int8, '.2f'):>8}"
        )


def draw(home: HomeSize, rows: Sequence[str], known: dict[Cell, Losses], path: Path) -> None:
    """Draw each row's losses, as means of its seeds, over the hours that its updates take. The file's suffix chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0 * len(LINKS), 5.0), layout="constrained")
    for link, panel in zip(LINKS, figure.subplots(1, len(LINKS), sharey=True), strict=True):
        for number, name in enumerate(rows):
            row = home.on(ROWS[name], link)
            runs = [losses for cell, losses in sorted(known.items(), key=lambda item: item[0].seed) if cell.row == row]
            hours = [updates * update_s(home, ROWS[name], link) / 3600 for updates, _ in runs[0]] if runs else []
            means = [statistics.fmean(loss for _, loss in at) for at in zip(*runs, strict=True)]
            panel.plot(hours, means, label=name, color=f"C{number % 10}", linestyle="-" if number < 10 else "--")
        panel.set_xscale("log")
        panel.set_title(link.name)
        panel.set_xlabel("hours")
    panel.set_ylabel("evaluation loss, nats per token")
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def known_in(path: Path | None, size: Size) -> dict[Cell, Losses]:
    """The results of this size that a file holds."""
    told = [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.exists() else []
    mine = [each for each in told if each["size"] == dataclasses.asdict(size)]
    return {Cell(Row(**each["row"]), each["seed"]): [(step, loss) for step, loss in each["losses"]] for each in mine}


def wanted_cells(home: HomeSize, rows: Sequence[str], seeds: int) -> list[Cell]:
    """Seed by seed, so that a race that was stopped has all rows once before any twice. Rows that are one training on all links are one."""
    cells = [Cell(home.on(ROWS[name], link), seed) for seed in range(seeds) for name in rows for link in LINKS]
    return list(dict.fromkeys(cells))


def train_all(given: argparse.Namespace, size: Size, cells: Sequence[Cell], known: dict[Cell, Losses]) -> None:
    """Train what is not known, until the time that --budget allows is over."""
    ends_s = time.monotonic() + given.budget
    for number, cell in enumerate(cells, 1):
        if cell in known:
            continue
        if time.monotonic() > ends_s:
            progress(f"the time is over: {len(cells) - number + 1} trainings are left; the same command goes on")
            return
        began_s = time.monotonic()
        known[cell] = train(size, cell)
        progress(f"{number}/{len(cells)}, seed {cell.seed}: {cell.row}: {known[cell][-1][1]:.4f} in {time.monotonic() - began_s:.0f} s")
        if given.state is not None:
            told = {"size": dataclasses.asdict(size), "row": dataclasses.asdict(cell.row), "seed": cell.seed, "losses": known[cell]}
            with given.state.open("a") as file:
                file.write(json.dumps(told) + "\n")


def parse() -> tuple[argparse.Namespace, Size]:
    parser = argparse.ArgumentParser(prog="scripts/bench race", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--short", action="store_true", help="a race of ten minutes: a smaller model, few updates, one seed")
    parser.add_argument("--state", type=Path, metavar="FILE", help="append results here, and do not compute again what is there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw losses over time, one panel for each link (needs matplotlib)")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no training after so long")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help="which rows (default: all)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="trainings of each row (default 2)")
    parser.add_argument("--updates", type=int, metavar="N", help="of each training (default 2048; 128 with --short)")
    parser.add_argument("--d-model", type=int, metavar="N", help="width of the trained model, a multiple of 16 (default 256; 64)")
    parser.add_argument("--rate", type=float, default=2e-3, metavar="X", help="AdamW's learning rate (default 2e-3)")
    parser.add_argument("--muon-rate", type=float, default=1e-2, metavar="X", help="Muon's learning rate (default 1e-2)")
    parser.add_argument("--target", type=float, default=0.8, metavar="SHARE", help="of the dense row's updates (default 0.8)")
    given = parser.parse_args()
    is_short = given.short
    size = Size(
        d_model=given.d_model or (64 if is_short else 256),
        layers=4 if is_short else 8,
        stages=4 if is_short else 8,
        sequences=4,
        sequence_length=64 if is_short else 128,
        updates=given.updates or (128 if is_short else 2048),
        rate=given.rate,
        muon_rate=given.muon_rate,
        tokenizer="bytes" if is_short else "bpe:4096",
    )
    if given.seeds < 1 or size.updates % (LOCAL_UPDATES * MARKS) or size.d_model % 16 or not 0 < given.target <= 1:
        parser.error(f"--updates must be a multiple of {LOCAL_UPDATES * MARKS}, --d-model of 16, --seeds at least 1, --target 0 to 1")
    if is_short:
        given.seeds = 1
    given.rows = list(dict.fromkeys(["dense float32", "int8", *given.rows]))
    return given, size


def main() -> int:
    given, size = parse()
    home = HomeSize()
    known = known_in(given.state, size)
    train_all(given, size, wanted_cells(home, given.rows, given.seeds), known)
    if given.plot is not None:
        draw(home, given.rows, known, given.plot)
    tables = [lines_on(link, home, given.rows, known, given.seeds, given.target) for link in LINKS]
    if given.json:
        rows = [dataclasses.asdict(line) for lines in tables for line in lines]
        print(json.dumps({"schema": SCHEMA, "size": dataclasses.asdict(size), "home": dataclasses.asdict(home), "rows": rows}))
        return 0
    print(f"{size.layers} layers of width {size.d_model}, {size.updates} updates, {given.seeds} seed(s)")
    for lines in tables:
        show(lines)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
