"""Who evaluates which step, and that the swarm agrees on the newest evaluation."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.route.evaluating import (
    LOSSES_APART,
    Takeover,
    Way,
    agreed_evaluation,
    agreed_loss,
    due_step,
    is_my_turn,
    is_my_turn_in_jury,
    jury_of,
    may_check,
    needed_of,
    newest_evaluation,
    settled_evaluation,
    ways,
)
from peerd.policy.step.ledger import work_step
from peerd.table.record import Evaluation, PeerId
from peerd.table.view import LiveView
from tests.strategies import live_views, member, view_of

TAKEOVER_S = 60.0


@given(st.integers(0, 10**6), st.integers(1, 1000), st.integers(0, 10**6))
def test_the_due_step_is_the_newest_multiple_or_the_end(step: int, every: int, last_step: int) -> None:
    due = due_step(step, every, last_step)
    assert due is not None
    assert due % every == 0 or due == last_step
    assert due <= step
    if not last_step or step < last_step:
        assert step - due < every


def test_nothing_is_due_where_evaluation_is_off() -> None:
    assert due_step(10, 0, 10) is None


@given(live_views(), st.integers(0, 9))
def test_exactly_one_trainer_that_stays_begins_an_evaluation_and_each_in_its_turn(live: LiveView, step: int) -> None:
    stay = [record.peer for record in live.records if record.trains and not record.leaving]
    for waited in range(len(stay)):
        begun = [r.peer for r in live.records if is_my_turn(replace(live, me=r.peer), step, waited * TAKEOVER_S, TAKEOVER_S)]
        assert len(begun) == waited + 1
        assert set(begun) <= set(stay)


def test_the_heir_of_a_dead_owner_begins_at_once() -> None:
    trainers = [member(f"p{number}", trains=True) for number in range(4)]
    live = view_of(*trainers)
    owner = next(r.peer for r in trainers if is_my_turn(replace(live, me=r.peer), 3, 0.0, TAKEOVER_S))
    rest = view_of(*(record for record in trainers if record.peer != owner))
    assert sum(is_my_turn(replace(rest, me=r.peer), 3, 0.0, TAKEOVER_S) for r in rest.records) == 1


def heir_begins_after(takeover: Takeover, due: int, since_s: float, microbatch_s: float = 0.0) -> float:
    """The time after which the second trainer takes an evaluation over, to ten seconds."""
    trainers = [member(f"p{number}", trains=True) for number in range(2)]
    live = view_of(*trainers)
    owner = next(r.peer for r in trainers if is_my_turn(replace(live, me=r.peer), due, 0.0, 1.0))
    heir = replace(live, me=next(r.peer for r in trainers if r.peer != owner))
    assert takeover.is_mine(replace(live, me=owner), since_s, microbatch_s)
    return next(10.0 * tens for tens in range(10**5) if takeover.is_mine(heir, since_s + 10.0 * tens, microbatch_s))


def test_an_evaluation_may_take_longer_where_steps_take_longer_and_as_long_as_the_last_one_did() -> None:
    """A minute a microbatch: the owner is not stuck because it is not done within a minute."""
    takeover = Takeover(num_microbatches=32, num_of_step=64)
    takeover.look(0, 0, False, 0.0)
    assert heir_begins_after(takeover, 0, 0.0) == heir_begins_after(takeover, 0, 0.0, 10.0) == 600.0
    assert heir_begins_after(takeover, 0, 0.0, 60.0) == 32 * 60.0, "no step has ended, but peers say what a microbatch takes"
    takeover.look(1, 0, False, 1000.0)
    assert heir_begins_after(takeover, 0, 0.0) == 3 * 0.5 * 1000.0
    takeover.look(1, 0, True, 1200.0)
    assert not takeover.is_mine(view_of(member("p0", trains=True)), 1200.0, 0.0)
    takeover.look(4, 4, False, 4000.0)
    assert heir_begins_after(takeover, 4, 4000.0) == 3 * 1200.0
    takeover.look(4, 4, True, 4002.0)
    takeover.look(8, 8, False, 8000.0)
    assert heir_begins_after(takeover, 8, 8000.0) == 60.0


@given(live_views(), st.lists(st.builds(Evaluation, st.integers(0, 9), st.floats(0, 9))))
def test_everybody_takes_the_same_evaluation_for_the_newest_and_none_of_a_step_to_come(live: LiveView, told: list[Evaluation]) -> None:
    records = tuple(replace(r, evaluation=told[number] if number < len(told) else None) for number, r in enumerate(live.records))
    views = [replace(live, me=me.peer, records=records) for me in live.records]
    found = {newest_evaluation(view, 2, None) for view in views}
    assert len(found) <= 1
    for newest in found - {None}:
        assert newest is not None
        reached = work_step(live, 2)
        assert reached is not None
        assert newest.step <= reached
        assert all(newest.step >= each.step for each in told[: len(records)] if each.step <= reached)


def test_my_own_evaluation_counts_before_it_is_announced() -> None:
    assert newest_evaluation(view_of(member("p1")), 2, Evaluation(4, 1.5)) == Evaluation(4, 1.5)


def test_one_peer_that_tells_another_loss_of_the_newest_evaluation_changes_nothing() -> None:
    told = [member(f"p{number}", step=4, stage=number % 2, evaluation=Evaluation(4, 1.5)) for number in range(4)]
    for lie in (0.0, 1e30):
        liar = member("liar", step=4, evaluation=Evaluation(4, lie))
        assert newest_evaluation(view_of(*told, liar), 2, None) == Evaluation(4, 1.5)


HONEST, STEP, NUM_STAGES = 1.5, 4, 2


class Liars:
    """A run of two stages. Some peers lie: in their records, and about each microbatch of an evaluation that passes through them."""

    def __init__(self, mates: int, liars: frozenset[str], told: float, num_stages: int = NUM_STAGES) -> None:
        self.num_stages, self.liars = num_stages, frozenset(PeerId(name) for name in liars)
        members = [member(f"p{stage}{n}", stage=stage, step=STEP, trains=True) for stage in range(num_stages) for n in range(mates)]
        lie = Evaluation(STEP, told)
        self.records = [replace(r, evaluated=lie, evaluation=lie) if r.peer in self.liars else r for r in members]
        self.given_up = set[PeerId]()

    def live(self, me: PeerId) -> LiveView:
        return replace(view_of(*self.records), me=me)

    def loss_by(self, way: Way) -> float:
        """What an honest peer gets that sends a microbatch this way: all liars falsify it alike."""
        return 0.5 if self.liars.intersection(way) else HONEST

    def make(self, me: PeerId, num_microbatches: int = 4) -> Evaluation | None:
        losses = []
        for index in range(num_microbatches):
            tried, agreed = dict[Way, float](), None
            for way in ways(self.live(me), self.num_stages, STEP, index):
                tried[way] = self.loss_by(way)
                if (agreed := agreed_loss(tried, self.live(me), LOSSES_APART)) is not None:
                    break
            if agreed is None:
                return None
            losses.append(agreed)
        return Evaluation(STEP, sum(losses) / len(losses))

    def turn(self, me: PeerId) -> Evaluation | None:
        """One honest peer makes what it has to, and tells what it believes, which is returned."""
        live = self.live(me)
        own = live.find(me)
        assert own is not None
        made = own.evaluated
        if (
            made is None
            and me not in self.given_up
            and settled_evaluation(live, STEP, LOSSES_APART) is None
            and is_my_turn_in_jury(live, STEP)
        ):
            made = self.make(me)
            self.given_up |= {me} if made is None else set()
        believed = agreed_evaluation(live, self.num_stages, made, LOSSES_APART)
        self.records = [replace(r, evaluated=made, evaluation=believed) if r.peer == me else r for r in self.records]
        return believed

    def settle(self) -> set[Evaluation | None]:
        """All that honest peers ever believed, and at last what each of them does."""
        honest = [record.peer for record in self.records if record.peer not in self.liars]
        seen = {self.turn(me) for _ in range(8) for me in honest} - {None}
        return seen | {self.turn(me) for me in honest}


@given(st.integers(3, 6), st.integers(0, 5), st.integers(0, 5), st.sampled_from([0.0, HONEST * 1.01, 100.0, 1e30]))
def test_a_liar_in_each_stage_changes_no_evaluation_that_honest_peers_show(mates: int, first: int, second: int, told: float) -> None:
    """Both tell the same false loss, and falsify what passes through them. Before, the first one that told a loss was believed."""
    liars = frozenset({f"p0{first % mates}", f"p1{second % mates}"})
    assert Liars(mates, liars, told).settle() == {Evaluation(STEP, HONEST)}


def test_of_two_peers_of_a_stage_nobody_can_say_which_one_lies_so_there_is_no_evaluation() -> None:
    assert Liars(2, frozenset({"p10"}), 0.5).settle() == {None}
    assert Liars(2, frozenset(), 0.0).settle() == Liars(1, frozenset(), 0.0).settle() == {Evaluation(STEP, HONEST)}


@given(st.sampled_from([-1, 1]), st.integers(2, 4))
def test_hole_68_a_liar_that_is_the_first_or_the_last_at_a_step_is_not_alone_in_its_stage(others: int, mates: int) -> None:
    """Its word alone made a microbatch's loss, as if its stage had nobody else. Where the others are behind, one waits for them."""
    swarm = Liars(mates, frozenset({"p10"}), 0.5)
    swarm.records = [r if r.peer == "p10" or r.stage == 0 else replace(r, step=STEP + others) for r in swarm.records]
    me = PeerId("p00")
    assert may_check(swarm.live(me), NUM_STAGES, STEP) == (others > 0)
    assert swarm.make(me) == (Evaluation(STEP, HONEST) if others > 0 and mates > 2 else None)


def test_a_jury_of_which_all_are_honest_makes_no_more_evaluations_than_have_to_agree() -> None:
    swarm = Liars(4, frozenset(), 0.0)
    swarm.settle()
    jury = jury_of(swarm.live(PeerId("p00")), STEP)
    assert [record.peer for record in swarm.records if record.evaluated is not None] == sorted(jury[: needed_of(len(jury))])


def test_who_comes_after_the_jury_has_left_believes_what_most_tell() -> None:
    told = [member(f"p{n}", stage=n % 2, step=STEP, trains=True, evaluation=Evaluation(STEP, HONEST)) for n in range(6)]
    liars = [member(name, step=STEP, trains=True, evaluation=Evaluation(STEP, 9.0), evaluated=Evaluation(STEP, 9.0)) for name in ("x", "y")]
    assert agreed_evaluation(view_of(*told, *liars), NUM_STAGES, None, LOSSES_APART) == Evaluation(STEP, HONEST)
    assert agreed_evaluation(view_of(*told[:1], *liars[:1]), NUM_STAGES, None, LOSSES_APART) is None


def test_with_many_stages_two_liars_change_nothing() -> None:
    for num_stages, mates in ((3, 3), (5, 5)):
        assert Liars(mates, frozenset({"p01", "p22"}), 0.5, num_stages).settle() == {Evaluation(STEP, HONEST)}


@given(live_views(), st.integers(1, 5), st.integers(0, 9), st.integers(0, 9))
def test_ways_are_different_and_pass_through_a_peer_of_each_stage(live: LiveView, num_stages: int, step: int, index: int) -> None:
    found = list(ways(live, num_stages, step, index))
    assert num_stages > 3 or len(set(found)) == len(found)
    for stage in range(num_stages):
        assert {way[stage] for way in found} <= {record.peer for record in live.serving(stage)}
