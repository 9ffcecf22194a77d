"""The plan from the demo's flags, and the figures of its summary: pure functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peerd.cli.demo_figures import Fault, Observed, longest_still_s, summary_of, tokens_per_second
from peerd.cli.demo_plan import DemoFlags, DemoPlan, Kill, plan_of
from peerd.config import manifest
from peerd.config.manifest import DataConfig, Manifest, TrainConfig
from peerd.control.protocol import StepInfo
from peerd.errors import ManifestError
from tests.cli.replies import counters, peer_info, status_reply


def plan(**flags: Any) -> DemoPlan:
    fields: dict[str, Any] = {
        **dict.fromkeys(("stages", "peers", "steps", "run_file", "seed", "accumulate", "chaos")),
        "slow": (),
        "kill": (),
        "stand_in_ms": 0.0,
    }
    return plan_of(DemoFlags(**{**fields, **flags}))


def finished(step: int, *, loss: float = 1.0, time_s: float = 0.0) -> StepInfo:
    return StepInfo(step=step, loss=loss, tokens=1000, time_s=time_s)


def test_the_demo_without_flags_is_four_peers_in_two_stages_with_one_thread_each() -> None:
    made = plan()
    assert (made.num_peers, made.num_stages, made.steps) == (4, 2, 30)
    assert made.manifest.compute.threads == 1
    assert [made.stage_of(peer) for peer in range(4)] == [0, 1, 0, 1]


def test_more_stages_bring_a_layer_and_a_peer_each() -> None:
    made = plan(stages=6)
    assert made.manifest.model.num_layers == 6
    assert made.num_peers == 6


def test_flags_win_over_the_run_file_and_the_run_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(manifest.dump(Manifest(name="mine", seed=5, train=TrainConfig(num_stages=1, steps=9))))
    made = plan(run_file=path, accumulate="float64")
    assert (made.manifest.name, made.manifest.seed, made.num_stages, made.steps) == ("mine", 5, 1, 9)
    assert made.manifest.train.accumulate == "float64"
    assert plan(run_file=path, seed=0, steps=3).manifest.seed == 0
    assert plan(run_file=path, seed=0, steps=3).steps == 3


def test_a_run_files_relative_text_is_found_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(manifest.dump(Manifest(data=DataConfig(source="text"))))
    with pytest.raises(ManifestError, match=r"data\.source"):
        plan(run_file=path)
    (tmp_path / "text").mkdir()
    assert plan(run_file=path).manifest.data.source == str(tmp_path / "text")
    assert plan(run_file=path).data_of_joiners == str(tmp_path / "text")
    assert plan().data_of_joiners == ""


def test_slow_and_kill_name_peers_by_number() -> None:
    made = plan(slow=("1=3", "0=1.5"), kill=("2@4", "3@0"))
    assert made.slow == {0: 1.5, 1: 3.0}
    assert made.kills == (Kill(peer=2, step=4), Kill(peer=3, step=0))


def test_speed_counts_from_the_end_of_the_first_step() -> None:
    assert tokens_per_second([]) is None
    assert tokens_per_second([finished(0)]) is None
    assert tokens_per_second([finished(0, time_s=10), finished(1, time_s=12), finished(2, time_s=14)]) == 500


def observed(**changes: Any) -> Observed:
    fields: dict[str, Any] = {"steps": (), "counters": {}, "faults": (), "duration_s": 1.0}
    return Observed(**{**fields, **changes})


def test_counters_of_all_daemons_are_summed_and_a_silent_ones_share_is_zero() -> None:
    made = plan(steps=2)
    full = counters(accumulated_microbatches=16, boundary_crossings=32, boundary_bytes=3200, replayed_microbatches=1)
    seen = observed(steps=(finished(0, loss=4), finished(1, loss=2, time_s=2)), counters={0: full, 1: full})
    summary = summary_of(made, seen)
    assert summary["microbatches_by_peer"] == [16, 16, 0, 0]
    assert summary["replayed_microbatches"] == 2
    assert summary["bytes_per_boundary_crossing"] == 100
    assert summary["transfers_per_boundary"] == 2.0  # 64 crossings of 1 boundary by 2 x 16 microbatches
    assert (summary["loss_first"], summary["loss_last"], summary["steps"]) == (4, 2, 2)


def test_one_stage_has_no_boundary_to_cross() -> None:
    summary = summary_of(plan(stages=1, steps=1), observed(steps=(finished(0),), counters={0: counters()}))
    assert summary["transfers_per_boundary"] is None
    assert summary["bytes_per_boundary_crossing"] is None
    assert summary["tokens_per_second"] is None


def test_faults_are_listed_as_data() -> None:
    fault = Fault(t_s=1.5, peer=3, stage=1, phase="averaging", kind="kill", detail="was ended by SIGKILL")
    summary = summary_of(plan(), observed(faults=(fault,)))
    listed = {"t_s": 1.5, "peer": 3, "stage": 1, "phase": "averaging", "kind": "kill", "detail": "was ended by SIGKILL"}
    assert summary["faults"] == [{**listed, "lasted_s": None, "steps_again": 0}]


def test_a_demo_may_stand_still_for_as_long_as_its_microbatches_take() -> None:
    """Three of 40 s and 200 s: the slower of two peers counts."""
    told = [status_reply(peer=peer_info(stage=stage, microbatch_s=took_s)) for stage, took_s in ((0, 40.0), (1, 100.0), (1, 200.0))]
    assert longest_still_s([*told, None], 180.0) == 3 * 240.0
    assert longest_still_s([status_reply(), None], 180.0) == 180.0
