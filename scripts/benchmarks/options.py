"""Is the swarm's loss curve that of one machine, step for step, with each training option?

For each option a swarm of real daemons trains the run, then `peerd reference` trains it again in one process. The table says by how
much losses and parameters differ at most; --plot draws both curves. Sums are in double precision, so that their order shows in
no loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerd.config import manifest as manifests
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.errors import ExitCode, PeerdError
from scripts.benchmarks._report import SCHEMA, progress

OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {},
    "lamb": {"train": {"optimizer": "lamb"}},
    "sgd": {"train": {"optimizer": "sgd", "learning_rate": 0.3}},
    "cosine": {"train": {"schedule": "cosine", "warmup_steps": 2}},
    "clipping": {"train": {"max_gradient_norm": 0.5}},
    "bfloat16": {"train": {"precision": "bfloat16"}},
    "float16": {"train": {"precision": "float16"}},
    "dropout": {"train": {"dropout": 0.1}},
    "offload": {"compute": {"offload_optimizer": True}},
    "parameter averaging": {"train": {"average_parameters_every_steps": 2}},
}
DAEMONS_TIMEOUT_S = 1800.0
COMMAND = [sys.executable, "-P", "-c", "from peerd.cli.main import main; main()"]


@dataclass(frozen=True, slots=True)
class Outcome:
    option: str
    swarm: tuple[float, ...]
    reference: tuple[float, ...]
    parameters_apart: float
    """The largest difference of a parameter, as a share of its tensor's largest value."""

    @property
    def losses_apart(self) -> float:
        return max(abs(ours - theirs) for ours, theirs in zip(self.swarm, self.reference, strict=True))


def base_run(path: Path | None, num_stages: int) -> Manifest:
    if path is not None:
        run = manifests.load(path)
        source = run.data.source if run.data.source == "stdlib" else str((path.absolute().parent / run.data.source).absolute())
        return dataclasses.replace(run, data=dataclasses.replace(run.data, source=source))
    return Manifest(
        name="options",
        model=ModelConfig(num_layers=6, d_model=64, num_heads=4, d_ff=128),
        train=TrainConfig(num_stages=num_stages, microbatches_per_step=12, microbatch_size=2, sequence_length=64, learning_rate=0.01),
        swarm=SwarmConfig(announce_period_s=1.0),
    )


def with_option(run: Manifest, changes: Mapping[str, Mapping[str, Any]], steps: int) -> Manifest:
    train = dataclasses.replace(run.train, **{"steps": steps, "accumulate": "float64", **changes.get("train", {})})
    compute: ComputeConfig = dataclasses.replace(run.compute, **{"threads": 1, **changes.get("compute", {})})
    return dataclasses.replace(run, train=train, compute=compute)


def run_both(option: str, run: Manifest, num_peers: int, folder: Path) -> Outcome:
    from safetensors.torch import load_file

    ours, theirs, file = folder / "swarm", folder / "reference", folder / "run.toml"
    folder.mkdir()
    file.write_text(manifests.dump(run), encoding="utf-8")
    train = run.train
    peerd("demo", "--run", file, "--stages", train.num_stages, "--peers", num_peers, "--steps", train.steps, "--out", ours, "--json")
    peerd("reference", ours / "run.toml", "--steps", train.steps, "--out", theirs)
    found, expected = (load_file(each / "model.safetensors") for each in (ours, theirs))
    apart = max(float((found[name] - value).abs().max() / value.abs().max().clamp_min(1e-30)) for name, value in expected.items())
    outcome = Outcome(option, losses_of(ours), losses_of(theirs), apart)
    progress(f"{option}: losses differ by {outcome.losses_apart:.1e}, parameters by {apart:.1e}")
    return outcome


def peerd(*arguments: object) -> None:
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=DAEMONS_TIMEOUT_S, check=False)
    if done.returncode != ExitCode.OK:
        raise PeerdError(f"peerd {arguments[0]} ended with {done.returncode}: {done.stderr.strip()[-500:]}")


def losses_of(folder: Path) -> tuple[float, ...]:
    return tuple(json.loads(line)["loss"] for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines())


def print_outcomes(outcomes: list[Outcome]) -> None:
    print(f"{'option':<20}  {'first loss':>10}  {'last loss':>10}  {'losses apart':>12}  {'parameters apart':>16}")
    for found in outcomes:
        first, last = found.swarm[0], found.swarm[-1]
        print(f"{found.option:<20}  {first:>10.6f}  {last:>10.6f}  {found.losses_apart:>12.1e}  {found.parameters_apart:>16.1e}")


def plot(outcomes: list[Outcome], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for found in outcomes:
        (line,) = axes.plot(found.reference, linewidth=3, alpha=0.35)
        axes.plot(found.swarm, "--", linewidth=1, color=line.get_color(), label=found.option)
    axes.set(xlabel="step", ylabel="loss, nats per token", title="dashed: the swarm; broad: one machine")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench options", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="OPTION", help=f"of {', '.join(OPTIONS)} (default: all)")
    parser.add_argument("--run", type=Path, metavar="RUN.toml", help="the run that the options are added to (default: a small decoder)")
    parser.add_argument("--stages", type=int, default=3, metavar="N", help="of the default run (default 3)")
    parser.add_argument("--peers", type=int, default=6, metavar="N", help="daemons (default 6)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps (default 20)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw both curves of every option")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in OPTIONS]
    if unknown:
        parser.error(f"no option {unknown[0]}; there are {', '.join(OPTIONS)}")
    try:
        run = base_run(given.run, given.stages)
        with tempfile.TemporaryDirectory(prefix="peerd-options-") as folder:
            outcomes = [
                run_both(name, with_option(run, OPTIONS[name], given.steps), given.peers, Path(folder) / str(number))
                for number, name in enumerate(given.names or OPTIONS)
            ]
    except PeerdError as error:
        print(f"options: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    if given.plot is not None:
        plot(outcomes, given.plot)
    if given.json:
        rows = [dataclasses.asdict(found) | {"losses_apart": found.losses_apart} for found in outcomes]
        print(json.dumps({"schema": SCHEMA, "rows": rows}))
    else:
        print_outcomes(outcomes)
    return ExitCode.OK if all(found.losses_apart == 0 for found in outcomes) else ExitCode.FAILURE


if __name__ == "__main__":
    sys.exit(main())
