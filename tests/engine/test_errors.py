"""Every kind of error that is the caller's has an exit code of its own."""

from __future__ import annotations

import inspect

import pytest

from engine import errors
from engine.errors import SparkproofError, must_be_one_of

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, SparkproofError)
]


def test_exit_codes_are_what_the_commands_promise():
    assert {kind.__name__: kind.exit_code for kind in KINDS} == {
        "SparkproofError": 1,
        "UsageError": 2,
        "ConfigError": 3,
        "CheckpointError": 4,
        "PackageError": 5,
        "RendezvousError": 6,
        "MemoryFloorError": 7,
        "RequestError": 8,
        "PeerLostError": 9,
    }


def test_exit_codes_are_different_and_none_is_success():
    codes = [kind.exit_code for kind in KINDS]
    assert len(set(codes)) == len(codes) and 0 not in codes


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_is_caught_as_one_and_is_no_error_of_ours(kind):
    with pytest.raises(SparkproofError, match="said"):
        raise kind("said")
    assert not issubclass(kind, AssertionError | ValueError | OSError)
    assert kind.__doc__


def test_a_value_outside_a_list_is_said_with_the_choices():
    sentence = must_be_one_of("scratch", "big", ("planned", "none"))
    assert sentence == "scratch is 'big'; accepted: planned, none"
