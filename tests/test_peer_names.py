"""What peers are called: one abbreviation of an id, and names that move no cursor and look like no id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.peer_names import MAX_NAME_CHARACTERS, check_name, known_as, short_id


def test_an_id_is_abbreviated_to_its_end() -> None:
    assert short_id("12D3KooWGRYZDHBembyGJQqQ6WgLqJWYNjnECJwGBnCg8vbCeo8F") == "..bCeo8F"
    assert (short_id(""), short_id("12345678"), short_id("123456789")) == ("", "12345678", "..456789")


@pytest.mark.parametrize("name", ["", "a", "anna", "Jos\u00e9 2", "x" * 24, "\u0410\u043d\u043d\u0430", "\u5b89\u5a1c", "lab_7.b-3"])
def test_letters_and_digits_of_any_language_make_a_name(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x" * 25, "25 characters; 24 at most"),
        ("\x1b[2J", "character '\\\\x1b'"),
        ("a\nb", "character"),
        ("a\u202eb", "character"),
        ("a\u0301\u0301\u0301", "character"),
        ("<b>", "character '<'"),
        ("[red]", "character"),
        ("..abcdef", "plain letters"),
        (" a", "plain letters"),
        ("a  b", "plain letters"),
        ("\uff41", "plain letters"),
    ],
)
def test_what_could_deceive_or_disturb_a_reader_is_refused_with_the_reason(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_name(name)


@given(st.text(max_size=30))
def test_a_name_is_short_and_printable(name: str) -> None:
    try:
        check_name(name)
    except ValueError:
        return
    assert name.isprintable()
    assert len(name) <= MAX_NAME_CHARACTERS
    assert not name.startswith(".")


def test_a_team_stands_behind_the_name() -> None:
    assert [known_as(*both) for both in (("", ""), ("anna", ""), ("", "rust"), ("anna", "rust"))] == ["", "anna", "(rust)", "anna (rust)"]
