"""Is the swarm's loss curve that of one machine, step for step, with each training option, and does the result load elsewhere?

For each option `peerd new` makes a run (a small Llama of transformers with a BPE trained on the text), a swarm of real daemons trains it
and exports it in both formats, and `peerd reference` trains it again in one process. The table shows the largest differences of losses,
parameters, and logits in a process that has only transformers. Options that only the built-in decoder has are tried with that. Sums are in
double precision, so that their order does not change any loss.

--out keeps the outcomes, with exports, a table and a plot of both curves of each option. Options that are already there are not run again,
so that a long series can be run in parts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerd.errors import ExitCode, PeerdError
from peerd.sim import plot as plots
from scripts.benchmarks._curves import draw
from scripts.benchmarks._equality import Outcome, Sizes, run_both
from scripts.benchmarks._report import SCHEMA, progress, run


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    changes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Changes of the manifest, by section."""
    why_decoder: str = ""
    """The reason for trying it with the built-in decoder; empty if it is not."""


OPTIONS: dict[str, Option] = {
    "adamw": Option(),
    "lamb": Option(changes={"train": {"optimizer": "lamb"}}),
    "clipping": Option(changes={"train": {"max_gradient_norm": 0.5}}),
    "bfloat16": Option(changes={"train": {"precision": "bfloat16"}}),
    "offload": Option(changes={"compute": {"offload": "all"}}),
    "shared layers": Option(changes={"model": {"layers_per_group": 2}}, why_decoder="no layers of a Llama share weights"),
    "muon": Option(changes={"train": {"optimizer": "muon"}}),
    "sgd": Option(changes={"train": {"optimizer": "sgd", "learning_rate": 0.3}}),
    "cosine": Option(changes={"train": {"schedule": "cosine", "warmup_steps": 2}}),
    "float16": Option(changes={"train": {"precision": "float16"}}),
    "delayed updates": Option(changes={"train": {"delayed_updates": True}}),
    "parameter averaging": Option(changes={"train": {"average_parameters": "always", "average_parameters_every_steps": 2}}),
    "dropout": Option(changes={"train": {"dropout": 0.1}}),
}
MOST_LOGITS_APART = 1e-5


def run_missing(names: Sequence[str], sizes: Sizes, out: Path) -> list[Outcome]:
    """The outcomes of these options; runs those that `out` does not have yet."""
    outcomes = []
    for name in names:
        folder = out / name.replace(" ", "-")
        kept = folder / "outcome.json"
        if kept.is_file():
            outcome = Outcome.read(kept)
            if outcome.steps != sizes.steps:
                raise PeerdError(f"{folder} is of {outcome.steps} steps", f"remove it, or ask for --steps {outcome.steps}")
        else:
            option = OPTIONS[name]
            outcome = run_both(name, option.changes, option.why_decoder, sizes, folder)
            kept.write_text(json.dumps(dataclasses.asdict(outcome)), encoding="utf-8")
        progress(f"{name}: losses differ by {outcome.losses_apart:.1e}, parameters by {outcome.parameters_apart:.1e}")
        outcomes.append(outcome)
    return outcomes


def lines_of(outcomes: Sequence[Outcome]) -> list[str]:
    apart = f"{'losses apart':>12}  {'parameters apart':>16}  {'logits apart':>12}"
    lines = [f"{'option':<20}  {'first loss':>10}  {'last loss':>10}  {apart}  loaded as"]
    for found in outcomes:
        logits = f"{found.logits_apart:.1e}" if found.logits_apart is not None else "-"
        lines.append(
            f"{found.option:<20}  {found.swarm[0]:>10.6f}  {found.swarm[-1]:>10.6f}  {found.losses_apart:>12.1e}"
            f"  {found.parameters_apart:>16.1e}  {logits:>12}  {found.loaded_as}"
        )
    lines += [f"{found.option}: the built-in decoder, for {found.why_decoder}" for found in outcomes if found.why_decoder]
    return lines + [f"{found.option}: not in transformers' format: {found.not_loaded}" for found in outcomes if found.not_loaded]


def is_equal(outcome: Outcome) -> bool:
    return outcome.losses_apart == 0 and (outcome.logits_apart or 0.0) <= MOST_LOGITS_APART


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench options", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="OPTION", help=f"of {', '.join(OPTIONS)} (default: all)")
    parser.add_argument("--stages", type=int, default=3, metavar="N", help="(default 3)")
    parser.add_argument("--peers", type=int, default=6, metavar="N", help="daemons (default 6)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="(default 20)")
    parser.add_argument("--layers", type=int, default=6, metavar="N", help="(default 6)")
    parser.add_argument("--d-model", type=int, default=128, metavar="N", help="width (default 128)")
    parser.add_argument("--vocabulary", type=int, default=2048, metavar="N", help="tokens of the BPE (default 2048)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep outcomes, exports, table.txt, curves.png and curves.svg there")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in OPTIONS]
    if unknown:
        parser.error(f"no option {unknown[0]}; there are {', '.join(OPTIONS)}")
    if min(given.stages, given.steps, given.layers, given.d_model) < 1 or given.peers < given.stages or given.layers < 2 * given.stages:
        parser.error("numbers must be at least 1, with a peer and two layers or more per stage")
    return given


def main() -> int:
    given = parse()
    sizes = Sizes(
        num_stages=given.stages,
        num_peers=given.peers,
        steps=given.steps,
        num_layers=given.layers,
        d_model=given.d_model,
        vocab_size=given.vocabulary,
    )
    with tempfile.TemporaryDirectory(prefix="peerd-options-") as temporary:
        out = (given.out or Path(temporary)).absolute()
        out.mkdir(parents=True, exist_ok=True)
        if given.out is not None:
            plots.check(out / "curves.png")
        outcomes = run_missing(given.names or [*OPTIONS], sizes, out)
    lines = lines_of(outcomes)
    if given.out is not None:
        (given.out / "table.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for suffix in plots.FORMATS:
            draw(outcomes, given.out / f"curves{suffix}")
    if given.json:
        rows = [dataclasses.asdict(found) | {"losses_apart": found.losses_apart} for found in outcomes]
        print(json.dumps({"schema": SCHEMA, "rows": rows}))
    else:
        print("\n".join(lines))
        for found in outcomes:
            if found.text:
                print(f"{found.option}: {found.prompt!r} goes on: {found.text!r}")
    return ExitCode.OK if all(map(is_equal, outcomes)) else ExitCode.FAILURE


if __name__ == "__main__":
    sys.exit(run(main))
