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

Each row has its own learning rate: seed 0 trains with all of --rate (--muon-rate), with local steps also with all of --outer, and the one
that ends with the lowest loss is the row's in the table and with the other seeds.

Results of trainings are appended to the file that --state names, and are not computed again: stop it, and go on with the same command. The
training under way lies beside it (".part"), as it was at its last evaluation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from pathlib import Path

from peerd.config.paths import cache_folder
from peerd.data.sources import STDLIB
from peerd.data.tokens import prepare_tokens
from peerd.planner.contenders import CONTENDERS, LOCAL_UPDATES, Contender
from peerd.train.corpus import Corpus
from scripts.benchmarks._race import BETWEEN, LINKS, Link, update_s
from scripts.benchmarks._race_lines import Known, Race, lines_on, show
from scripts.benchmarks._race_results import write
from scripts.benchmarks._race_training import MARKS, Cell, Size, Tuning, train
from scripts.benchmarks._report import SCHEMA, progress, run


def draw(race: Race, known: Known, path: Path) -> None:
    """Draw each row's losses, as means of its seeds, over the hours that its updates take. The file's suffix chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0 * len(race.links), 5.0), layout="constrained")
    panels = figure.subplots(1, len(race.links), sharey=True, squeeze=False).flat
    for link, panel in zip(race.links, panels, strict=True):
        for number, name in enumerate(race.rows):
            runs = list(race.runs(race.home.on(CONTENDERS[name], link), known).values())
            hours = [updates * update_s(race.home, CONTENDERS[name], link) / 3600 for updates, _ in runs[0]] if runs else []
            means = [statistics.fmean(loss for _, loss in at) for at in zip(*runs, strict=True)]
            panel.plot(hours, means, label=name, color=f"C{number % 10}", linestyle="-" if number < 10 else "--")
        panel.set_xscale("log")
        panel.set_title(link.name)
        panel.set_xlabel("hours")
    panels[0].set_ylabel("evaluation loss, nats per token")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def known_in(path: Path | None, size: Size) -> Known:
    """The results of this size that a file holds."""
    told = [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.exists() else []
    mine = [each for each in told if each["size"] == dataclasses.asdict(size)]
    return {
        Cell(Contender(**each["row"]), each["seed"], Tuning(**each["tuning"])): [(updates, loss) for updates, loss in each["losses"]]
        for each in mine
    }


def train_all(race: Race, known: Known, state: Path | None, budget_s: float) -> None:
    """Train what is not known, until the time is over."""
    ends_s = time.monotonic() + budget_s
    part = state.with_name(f"{state.name}.part") if state is not None else None
    while (cell := race.next_cell(known)) is not None:
        began_s, manifest = time.monotonic(), race.size.manifest(cell)
        corpus = Corpus(prepare_tokens(STDLIB, cache_folder(), manifest.data), manifest)
        losses = train(manifest, corpus, part, lambda: time.monotonic() < ends_s)
        if losses is None:
            progress("the time is over; the same command goes on")
            return
        known[cell] = losses
        progress(
            f"{len(known)}: seed {cell.seed}, {cell.tuning.name}, {cell.row}: {losses[-1][1]:.4f} in {time.monotonic() - began_s:.0f} s"
        )
        if state is not None:
            told = {"size": dataclasses.asdict(race.size), **dataclasses.asdict(cell), "losses": losses}
            with state.open("a") as file:
                file.write(json.dumps(told) + "\n")


def _link(text: str) -> Link:
    mbit, _, milliseconds = text.partition("/")
    found = Link(float(mbit), float(milliseconds))
    if not (0 < found.mbit_per_s < math.inf and 0 <= found.round_trip_ms < math.inf):
        raise ValueError(text)
    return found


def _outer(text: str) -> tuple[float, float]:
    rate, _, momentum = text.partition(":")
    return float(rate), float(momentum)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scripts/bench race", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="one JSON object on standard output")
    made.add_argument("--short", action="store_true", help="a race of ten minutes: a smaller model, few updates, one seed, one rate")
    made.add_argument("--state", type=Path, metavar="FILE", help="append results here, and do not compute again what is there")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw losses over time, one panel for each link (needs matplotlib)")
    made.add_argument("--results", type=Path, metavar="FILE", help="write what `peerd new --link` chooses from (peerd/planner/race.toml)")
    made.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="stop after so long; 0: only show what is there")
    made.add_argument(
        "--rows", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), metavar="ROW", help="which rows (default: all)"
    )
    made.add_argument("--link", nargs="+", type=_link, default=LINKS, metavar="MBIT/MS", help="lines (default 200/50 100/50 20/60)")
    made.add_argument("--seeds", type=int, default=2, metavar="N", help="trainings of each row (default 2)")
    made.add_argument("--updates", type=int, metavar="N", help="of each training (default 2048; 128 with --short)")
    made.add_argument("--d-model", type=int, metavar="N", help="width of the trained model, a multiple of 16 (default 256; 64)")
    made.add_argument("--layers", type=int, metavar="N", help="of the trained model, each a stage (default 8; 4)")
    made.add_argument("--tokenizer", metavar="NAME", help="bytes or bpe:SIZE (default bpe:4096; bytes)")
    made.add_argument("--sequence-length", type=int, metavar="N", help="(default 128; 64)")
    made.add_argument("--rate", type=float, nargs="+", metavar="X", help="AdamW's learning rates (default 1e-3 2e-3 4e-3; 2e-3)")
    made.add_argument("--muon-rate", type=float, nargs="+", metavar="X", help="Muon's (default 5e-3 1e-2 2e-2; 1e-2)")
    made.add_argument("--outer", type=_outer, nargs="+", metavar="RATE:MOMENTUM", help="of averages (default 0.7:0.9 1:0; 0.7:0.9)")
    made.add_argument("--target", type=float, default=0.8, metavar="SHARE", help="of the dense row's updates (default 0.8)")
    return made


def parse() -> tuple[argparse.Namespace, Race]:
    arguments = _parser()
    given = arguments.parse_args()
    is_short = given.short
    layers = given.layers or (4 if is_short else 8)
    size = Size(
        d_model=given.d_model or (64 if is_short else 256),
        layers=layers,
        stages=layers,
        sequences=4,
        sequence_length=given.sequence_length or (64 if is_short else 128),
        updates=given.updates or (128 if is_short else 2048),
        tokenizer=given.tokenizer or ("bytes" if is_short else "bpe:4096"),
    )
    if given.seeds < 1 or size.updates % (LOCAL_UPDATES * MARKS) or size.d_model % 16 or not 0 < given.target <= 1:
        arguments.error(f"--updates must be a multiple of {LOCAL_UPDATES * MARKS}, --d-model of 16, --seeds at least 1, --target 0 to 1")
    race = Race(
        size=size,
        rows=tuple(dict.fromkeys(["dense float32", "int8", *given.rows])),
        links=tuple(given.link),
        seeds=1 if is_short else given.seeds,
        rates=tuple(given.rate or ([2e-3] if is_short else [1e-3, 2e-3, 4e-3])),
        muon_rates=tuple(given.muon_rate or ([1e-2] if is_short else [5e-3, 1e-2, 2e-2])),
        outer=tuple(given.outer or ([(0.7, 0.9)] if is_short else [(0.7, 0.9), (1.0, 0.0)])),
        target=given.target,
    )
    return given, race


def main() -> int:
    given, race = parse()
    known = known_in(given.state, race.size)
    train_all(race, known, given.state, given.budget)
    if given.plot is not None:
        draw(race, known, given.plot)
    tables = [lines_on(race, link, known) for link in race.links]
    if given.results is not None:
        links = dict.fromkeys([*race.links, BETWEEN])
        write(given.results, race.size, {link: lines_on(race, link, known) for link in links})
    if given.json:
        rows = [dataclasses.asdict(line) for lines in tables for line in lines]
        print(json.dumps({"schema": SCHEMA, "size": dataclasses.asdict(race.size), "home": dataclasses.asdict(race.home), "rows": rows}))
        return 0
    print(f"{race.size.layers} layers of width {race.size.d_model}, {race.size.updates} updates")
    for lines in tables:
        show(lines)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
