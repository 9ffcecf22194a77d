"""What `peerd audit` prints, and how status and peers tell of audits."""

from __future__ import annotations

from peerd.cli.audit import audit_lines, audits_line
from tests.cli.replies import LIAR, audit_reply, audits_info

JUDGES = "..MMMMMM 2 off, 1e-04 allowed, ..NNNNNN 2 off, 1e-04 allowed"


def test_cases_and_the_last_audits_are_told_with_what_each_judge_measured() -> None:
    assert list(audit_lines(audit_reply())) == [
        "1 accused, 1 convicted, 1 missed, 12 right; drew 14 of 480 microbatches and parts of mates; kept 320 of 320 own calls for others",
        f"lost its standing: {LIAR}",
        f"convicted: microbatch 3 of step 7, stage 1, of ..LLLLLL; accused by ..MMMMMM; judges: {JUDGES}",
        "step 7, microbatch 2 of ..LLLLLL: missed: that call is not kept",
        "step 7, microbatch 3 of ..LLLLLL: convicted, 2.0e+00 off",
    ]


def test_a_run_without_audits_says_so_in_one_line() -> None:
    [line] = audit_lines(audit_reply(audits=None, last=[], cases=[]))
    assert 'swarm.trust = "audits"' in line


def test_a_volunteer_whose_device_computes_wrongly_reads_it_before_all_else() -> None:
    told = "3 mates computed this peer's microbatch 4 of step 2 again and got something else: it is 1.4 off, in proportion"
    assert list(audit_lines(audit_reply(audits=audits_info(own_fault=told))))[1] == told


def test_before_the_first_audit() -> None:
    fresh = audits_info(counts={}, items=0, drawn=0, kept=0, offered=0)
    assert audits_line(fresh) == "none yet; drew 0 of 0 microbatches and parts of mates; no own calls yet"
