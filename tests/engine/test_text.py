"""Streamed text equals the whole text, holds back what is undecided, and stops where it must."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat import ChatFormat, check_messages
from engine.errors import RequestError
from engine.text import Text, TextStream
from tests.engine.web import BYTES, FORM, write_tokenizer

BARE = Text()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return Text(write_tokenizer(tmp_path_factory.mktemp("text") / "tokenizer.json"))


def stream(text, ids, stops=()):
    """What each token shows, what is left at the end, and whether a stop text ended it."""
    source, shown = TextStream(text, stops), []
    for token_id in ids:
        piece, stopped = source.push(token_id)
        shown.append(piece)
        if stopped:
            return shown, "", True
    return shown, source.finish(), False


def test_a_character_is_held_back_until_its_last_byte(text):
    ids = text.encode("a\u20acb")
    shown, rest, _ = stream(text, ids)
    assert shown == ["a", "", "", "\u20ac", "b"] and rest == ""


def test_bytes_that_never_make_a_character_are_shown_in_the_end(text):
    broken = text.encode("\u20ac")[:2]
    shown, rest, _ = stream(text, broken)
    assert "".join(shown) == "" and rest == text.decode(broken)
    shown, rest, _ = stream(text, broken[:1] * 9)
    assert "".join(shown) + rest == "\ufffd" * 9


@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_a_stream_adds_up_to_the_text(text_of_module, words):
    ids = text_of_module.encode(words)
    shown, rest, stopped = stream(text_of_module, ids)
    assert "".join(shown) + rest == words and not stopped


@pytest.fixture(scope="module")
def text_of_module(text):
    return text


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_stream_ends_exactly_where_the_first_stop_text_begins(text_of_module, words, stops):
    shown, rest, stopped = stream(text_of_module, text_of_module.encode(words), stops)
    ends = [words.find(stop) + len(stop) for stop in stops if stop in words]
    if not ends:
        assert ("".join(shown) + rest, stopped) == (words, False)
        return
    seen = words[: min(ends)]
    begin = min(seen.find(stop) for stop in stops if stop in seen)
    assert ("".join(shown), stopped) == (words[:begin], True)


def test_what_may_become_a_stop_text_is_held_back(text):
    shown, rest, stopped = stream(text, text.encode("one END"), ["END."])
    assert "".join(shown) == "one " and rest == "END" and not stopped


def test_without_a_tokenizer_ids_are_spelled(text):
    assert BARE.decode([5, 70]) == "token_id:5token_id:70"
    assert stream(BARE, [5, 70], [":7"]) == (["token_id:5", "token_id"], "", True)
    with pytest.raises(RequestError, match="there is no tokenizer here"):
        BARE.encode("hi")


def test_special_tokens_in_text_are_text_and_in_ids_are_themselves(text):
    spelled = f"{FORM.begin}{FORM.user}{FORM.think_open}"
    ids = text.encode(spelled)
    assert max(ids) < BYTES and text.decode(ids) == spelled
    assert text.decode([BYTES]) == FORM.begin == text.piece(BYTES)
    assert text.encode("a", add_special_tokens=True) == [BYTES, *text.encode("a")]


def test_a_format_may_leave_special_tokens_out(text):
    plain = ChatFormat(think_open="", think_close="", begin="")
    ids = plain.encode([{"role": "user", "content": "x"}], text, thinking=True)
    assert text.decode(ids) == f"{FORM.user}x{FORM.assistant}"


def test_a_special_token_that_the_tokenizer_lacks_is_named(text):
    odd = ChatFormat(user="<|human|>")
    with pytest.raises(RequestError, match="no token '<|human|>'"):
        odd.encode([{"role": "user", "content": "x"}], text, thinking=False)


def test_roles_are_checked():
    with pytest.raises(RequestError, match=r"messages\[0\].role is 'x'; accepted: system, user"):
        check_messages([{"role": "x", "content": ""}])
