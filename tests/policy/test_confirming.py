"""What members of a round say that came of it, and what one of them makes of that: rule 18 (certify) in groups."""

from __future__ import annotations

from dataclasses import replace

from peerd.policy.step.certificates import SignedSlice, Slices, average_id_of
from peerd.policy.step.confirming import RoundOutcomes, RoundProof, SignedOutcome, are_most, mute_members
from peerd.policy.step.judging import NUM_JUDGES
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.table.record import AverageId, PeerId, RunId

NAMES = tuple(PeerId(f"p{number}") for number in range(4))
ROSTER = Roster(0, 3, 0, NAMES[0], tuple(RosterEntry(name, 1, 0, 1 << number) for number, name in enumerate(NAMES)))
AVERAGING_S = 2.0


def slices(last: bytes = b"") -> Slices:
    """Of all members; that of the last one may be another."""
    roots = [bytes([number]) * 32 for number in range(len(NAMES))]
    return tuple(SignedSlice(name, root, b"") for name, root in zip(NAMES, [*roots[:-1], last or roots[-1]], strict=True))


def word(name: PeerId, held: Slices, *, is_shown: bool = False) -> SignedOutcome:
    return SignedOutcome(name, average_id_of(ROSTER, held), b"", held if is_shown else ())


def at_member(*others: SignedOutcome, now_s: float = 0.0) -> RoundOutcomes:
    """The words at the first member, which has all sums."""
    outcomes = RoundOutcomes(ROSTER, AVERAGING_S)
    outcomes.hold(word(NAMES[0], slices(), is_shown=True), now_s)
    for other in others:
        outcomes.hear(other, now_s)
    return outcomes


def test_a_member_goes_by_the_sum_once_more_than_half_say_the_same() -> None:
    outcomes = at_member(word(NAMES[1], slices()))
    assert outcomes.settled() is None
    assert not outcomes.is_disputed
    assert outcomes.hear(word(NAMES[2], slices()), 0.0)
    assert not outcomes.hear(word(NAMES[2], slices()), 0.0), "it says nothing new"
    assert outcomes.settled()
    assert [each.member for each in outcomes.agreeing] == list(NAMES[:3])
    assert not any(each.slices for each in outcomes.agreeing)


def test_a_member_that_lacks_sums_goes_by_nothing() -> None:
    outcomes = RoundOutcomes(ROSTER, AVERAGING_S)
    for name in NAMES[1:]:
        outcomes.hear(word(name, slices()), 0.0)
    assert outcomes.settled() is None
    assert outcomes.agreeing == ()
    assert outcomes.at_fault(1e3, 0) is None
    outcomes.hold(word(NAMES[0], slices(), is_shown=True), 0.0)
    assert outcomes.settled()


def test_unlike_slices_prove_who_has_signed_two() -> None:
    false = slices(b"f" * 32)
    outcomes = at_member(word(NAMES[1], false))
    assert outcomes.is_disputed
    assert outcomes.at_fault(0.0, 0) is None
    assert outcomes.hear(word(NAMES[1], false, is_shown=True), 0.0)
    pair = outcomes.contradiction
    assert pair is not None
    assert {each.reducer for each in pair} == {NAMES[3]}
    assert outcomes.at_fault(0.0, 0) == (NAMES[3], "it has signed two slices of the round")


def test_slices_that_do_not_lead_to_what_a_member_says_show_nothing() -> None:
    false = replace(word(NAMES[1], slices(b"f" * 32)), slices=slices(b"g" * 32))
    outcomes = at_member(false)
    assert outcomes.contradiction is None
    assert outcomes.at_fault(AVERAGING_S, 0) is None
    expected = NAMES[1], "it does not show what it says that it holds of the round"
    assert outcomes.at_fault(1.01 * AVERAGING_S, 0) == expected
    assert outcomes.at_fault(1.01 * AVERAGING_S, 1) is None, "the first judge judges first"
    assert outcomes.at_fault(2.01 * AVERAGING_S, 1) == expected


def test_a_member_that_signs_two_outcomes_counts_for_neither() -> None:
    outcomes = at_member(word(NAMES[1], slices()), word(NAMES[3], slices(b"f" * 32)))
    assert outcomes.hear(word(NAMES[3], slices()), 0.0)
    assert outcomes.settled() is None
    assert outcomes.at_fault(0.0, 2) == (NAMES[3], "it has signed two outcomes of the round")
    outcomes.hear(word(NAMES[2], slices()), 0.0)
    assert outcomes.settled(), "three of four say the same"
    assert outcomes.at_fault(0.0, 0) is None


def test_a_member_with_all_sums_that_says_nothing_of_them_is_left_out_and_one_that_lacks_some_is_not() -> None:
    outcomes = at_member(word(NAMES[1], slices()))
    assert outcomes.at_fault(10 * AVERAGING_S, 0) is None
    outcomes.complete(NAMES[2], AVERAGING_S)
    assert outcomes.at_fault(2 * AVERAGING_S, 0) is None
    assert outcomes.at_fault(2.01 * AVERAGING_S, 0) == (NAMES[2], "it does not say what came of the round")
    assert mute_members(NAMES[:2], {NAMES[2]: 0.0, NAMES[1]: 0.0}, 1.0, 0.5) == [NAMES[2]]


def test_a_member_leaves_a_round_of_which_most_hold_something_else_once_each_judge_has_had_its_turn() -> None:
    others = [word(name, slices(b"f" * 32)) for name in NAMES[1:3]]
    outcomes = at_member(*others)
    assert outcomes.settled() is False
    assert not outcomes.is_given_up((1 + NUM_JUDGES) * AVERAGING_S)
    assert outcomes.is_given_up((1 + NUM_JUDGES) * AVERAGING_S + 0.1)


def test_what_a_member_signs_names_run_round_outcome_and_member() -> None:
    base, run = word(NAMES[0], slices()), RunId("run")
    texts = {
        base.statement(run, ROSTER.average_id),
        base.statement(RunId("other"), ROSTER.average_id),
        base.statement(run, AverageId(bytes(16))),
        replace(base, member=NAMES[1]).statement(run, ROSTER.average_id),
        replace(base, average_id=AverageId(bytes(16))).statement(run, ROSTER.average_id),
    }
    assert len(texts) == 5
    assert word(NAMES[0], slices(), is_shown=True).statement(run, ROSTER.average_id) in texts, "the slices are signed by themselves"


def test_a_section_is_certified_by_more_than_half_of_its_makers_that_have_signed_its_very_numbers() -> None:
    words = [word(name, slices()) for name in NAMES]
    assert RoundProof(ROSTER, slices(), tuple(words[:3])).is_certified
    assert not RoundProof(ROSTER, slices(), tuple(words[:2])).is_certified
    assert not RoundProof(ROSTER, slices(b"f" * 32), tuple(words)).is_certified
    stranger = replace(words[0], member=PeerId("x"))
    assert not RoundProof(ROSTER, slices(), (*words[:2], stranger)).is_certified
    assert are_most(NAMES[:3], ROSTER)
    assert not are_most([NAMES[0]] * 3, ROSTER)
