"""What is remembered of each peer, so that two texts under one version are noticed, and how both come to be heard."""

from __future__ import annotations

from operator import eq

from peerd.policy.swarm.contradictions import KEPT_BYTES, KEPT_OF_PEER, Heard
from peerd.policy.swarm.spreading import News, tag_of
from peerd.table.record import PeerId
from tests.strategies import member

LIAR, MATE = PeerId("liar"), PeerId("mate")


def heard() -> Heard[str]:
    return Heard(eq, len)


def test_another_text_under_one_pair_is_noticed_and_the_same_again_is_none() -> None:
    known = heard()
    known.note(LIAR, (1, 5), "one", until_s=9.0)
    assert known.other(LIAR, (1, 5), "two", 0.0) == "one"
    assert known.other(LIAR, (1, 5), "one", 0.0) is None
    assert known.other(LIAR, (2, 5), "two", 0.0) is None
    assert known.other(MATE, (1, 5), "two", 0.0) is None


def test_what_was_said_before_is_remembered_for_some_versions_and_for_the_life_of_the_record() -> None:
    known = heard()
    for version in range(KEPT_OF_PEER + 1):
        known.note(LIAR, (1, version), "one", until_s=9.0)
    assert known.other(LIAR, (1, 0), "two", 0.0) is None
    assert known.other(LIAR, (1, 1), "two", 0.0) == "one"
    assert known.other(LIAR, (1, 1), "two", 9.0) is None, "one that came back and lost its incarnation may say it again"
    known.forget(LIAR)
    known.forget(LIAR)
    assert known.other(LIAR, (1, 1), "two", 0.0) is None


def test_all_together_take_no_more_than_the_memory_that_there_is() -> None:
    known, size = heard(), KEPT_BYTES // 4
    for version in range(6):
        known.note(PeerId(f"p{version % 2}"), (1, version), "x" * size, until_s=9.0)
    assert [known.other(PeerId(f"p{version % 2}"), (1, version), "", 0.0) is not None for version in range(6)] == [False] * 2 + [True] * 4


def test_who_asks_for_news_hears_another_text_under_a_version_that_it_has() -> None:
    told, text = member("liar", version=5), (b"one text", b"")
    news = News(5.0)
    news.note(told, text, 0.0)
    assert news.unknown_to([tag_of(told, (b"another text", b""))], None, 0.0) == [text]
    assert news.unknown_to([tag_of(told, text)], None, 0.0) == []
