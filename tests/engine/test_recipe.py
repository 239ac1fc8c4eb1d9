"""A recipe holds every choice of an export, refuses what it does not know, and has one digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace

import pytest

from engine.errors import UsageError
from engine.recipe import Recipe, read_recipe, recipe_from_json
from engine.units import GIB


def test_defaults_are_the_seeds():
    recipe = Recipe()
    assert recipe.to_json() == {
        "ranks": 3,
        "max_concurrency": 32,
        "mtp_draft_tokens": 7,
        "prefill_chunk": 4096,
        "scratch": "planned",
        "accumulation": "float64",
        "device": "cpu",
        "kv_page_tokens": 128,
        "host_memory_floor_bytes": 8 * GIB,
    }


LIMITS = {
    "ranks": (1, 8),
    "max_concurrency": (1, 1024),
    "mtp_draft_tokens": (0, 32),
    "prefill_chunk": (1, 65536),
    "kv_page_tokens": (2, 4096),
    "host_memory_floor_bytes": (0, 2**50),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_number_is_accepted_up_to_its_limits_and_refused_beyond(name):
    least, most = LIMITS[name]
    for value in (least, most):
        assert getattr(Recipe(**{name: value}), name) == value
    for value in (least - 1, most + 1, str(least), float(most), True, None):
        with pytest.raises(UsageError) as caught:
            Recipe(**{name: value})
        expected = f"{name} is {value!r}; accepted: an integer from {least} to {most}"
        assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scratch": "big"}, "scratch is 'big'; accepted: planned, pools, none"),
        ({"device": "tpu"}, "device is 'tpu'; accepted: cpu, cuda"),
        ({"accumulation": "bf16"}, "accumulation is 'bf16'; accepted: float64, float32"),
        ({"accumulation": "float32"}, "on cpu only float64 is accepted"),
        ({"kv_page_tokens": 7}, "kv_page_tokens is 7; an even number is needed"),
    ],
)
def test_a_choice_that_there_is_not_is_refused(values, message):
    with pytest.raises(UsageError, match=message):
        Recipe(**values)
    if "accumulation" in values and values["accumulation"] == "float32":
        assert Recipe(device="cuda", **values).accumulation == "float32"


OTHERS = {
    "ranks": 2,
    "max_concurrency": 4,
    "mtp_draft_tokens": 5,
    "prefill_chunk": 64,
    "scratch": "none",
    "accumulation": "float32",
    "device": "cuda",
    "kv_page_tokens": 16,
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_choice_that_moves_bytes_or_bits_changes_the_digest(name):
    base = Recipe(device="cuda") if name == "accumulation" else Recipe()
    assert replace(base, **{name: OTHERS[name]}).digest != base.digest


def test_the_memory_floor_does_not_change_the_digest():
    assert set(OTHERS) | {"host_memory_floor_bytes"} == {f.name for f in fields(Recipe)}
    assert Recipe(host_memory_floor_bytes=0).digest == Recipe().digest


def test_the_digest_does_not_depend_on_the_order_of_the_choices():
    values = Recipe().to_json()
    del values["host_memory_floor_bytes"]
    text = json.dumps(dict(sorted(values.items())))
    assert Recipe().digest == hashlib.sha256(text.encode()).hexdigest()


def test_a_recipe_survives_json():
    recipe = Recipe(ranks=5, scratch="pools", kv_page_tokens=8)
    assert recipe_from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert recipe.with_ranks(2) == replace(recipe, ranks=2)


def test_an_unknown_key_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="here: unknown key 'rank'; accepted: accumulation, "):
        recipe_from_json({"rank": 3}, "here")


def test_a_floor_may_be_a_text():
    assert recipe_from_json({"host_memory_floor": "2GiB"}).host_memory_floor_bytes == 2 * GIB
    with pytest.raises(UsageError, match="host_memory_floor is 'lots'"):
        recipe_from_json({"host_memory_floor": "lots"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ranks = 3", r"has no \[recipe\] table; it has ranks"),
        ("", r"has no \[recipe\] table; it has nothing"),
        ("recipe = 3", r"has no \[recipe\] table"),
        ("[recipe", "is not TOML"),
        ("[recipe]\nranks = 9", "ranks is 9; accepted: an integer from 1 to 8"),
        ("[recipe]\nchunk = 9", "unknown key 'chunk'"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, content, message):
    path = tmp_path / "recipe.toml"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_recipe(path)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read the recipe .*absent.toml: No such file"):
        read_recipe(tmp_path / "absent.toml")
    (tmp_path / "raw.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"raw.toml is not TOML"):
        read_recipe(tmp_path / "raw.toml")


def test_a_file_gives_its_recipe_and_may_hold_other_tables(tmp_path):
    path = tmp_path / "recipe.toml"
    table = '[recipe]\nranks = 4\nhost_memory_floor = "1GiB"\n'
    path.write_text(f'about = "x"\n{table}[other]\na = 1\n')
    assert read_recipe(path) == Recipe(ranks=4, host_memory_floor_bytes=GIB)
