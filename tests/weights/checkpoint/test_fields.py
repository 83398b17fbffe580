"""fields.py: one kind of error, which names the field and where it is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jax_megamoe.weights.checkpoint.fields import MAX_INTEGER, Fields, read_fields, shown

CONTENT = dict(one=1, half=0.5, no=False, word="a", null=None, some=["a", "b"], few=[1, 2])
FIELDS = Fields(CONTENT | dict(inner=dict(x=3)), "a/config.json")


def test_values() -> None:
    assert FIELDS.integer("one") == FIELDS.integer("absent", "null", "one", minimum=1) == 1
    assert (FIELDS.number("half"), FIELDS.number("one")) == (0.5, 1.0)
    assert FIELDS.flag("no") is False
    assert FIELDS.text("word") == FIELDS.one_of("word", ["a", "b"]) == "a"
    assert (FIELDS.texts("some"), FIELDS.texts("null")) == (("a", "b"), ())
    assert (FIELDS.integers("few"), FIELDS.integers("absent")) == ((1, 2), ())
    inner = FIELDS.inner("inner")
    assert inner is not None and inner.integer("x") == 3
    assert inner.where("x") == "inner.x in a/config.json"
    assert FIELDS.inner("null") is None and FIELDS.each("absent") == {}


def test_values_of_a_layer() -> None:
    fields = Fields(dict(one=4, each=[4, 2], same=[3, 3], odd=[4, "2"]), "a/config.json")
    assert fields.of_layer(None, "one") == fields.of_layer(0, "each") == 4
    assert fields.of_layer(1, "each") == 2 and fields.of_layer(None, "same") == 3
    assert fields.of_layer(7, "absent", default=5) == 5
    for index, name, text in (
        (None, "each", "an integer, or a list of one the same for all layers, got a list of 2"),
        (2, "each", "an integer, or a list of one for layer 2, got a list of 2"),
        (0, "odd", "an integer >= 0, got '2'"),
    ):
        with pytest.raises(ValueError, match=rf"^{name} in a/config\.json: expected {text}"):
            fields.of_layer(index, name)
    with pytest.raises(ValueError, match=r"each in .*: expected an integer >= 3, got 2"):
        fields.of_layer(1, "each", minimum=3)


@pytest.mark.parametrize("read", [Fields.integer, Fields.number, Fields.flag, Fields.text])
def test_absent_and_null_have_the_default(read: Callable[..., Any]) -> None:
    assert read(FIELDS, "absent", "null", default=None) is None
    with pytest.raises(ValueError, match=r"absent in a/config.json: expected .*, got no such key"):
        read(FIELDS, "absent")
    with pytest.raises(ValueError, match=r"null in a/config.json: expected .*, got null"):
        read(FIELDS, "null")


@pytest.mark.parametrize(
    "read, value, text",
    [
        (Fields.integer, 1.0, r"an integer >= 0, got 1\.0"),
        (Fields.integer, True, "an integer >= 0, got true"),
        (Fields.integer, "1", "an integer >= 0, got '1'"),
        (Fields.integer, -1, "an integer >= 0, got -1"),
        (Fields.integer, MAX_INTEGER + 1, "an integer <= 2147483647, got 2147483648"),
        (Fields.number, float("inf"), "a finite number, got inf"),
        (Fields.number, 10**400, "a finite number, got an integer of 1329 bits"),
        (Fields.number, True, "a finite number, got true"),
        (Fields.flag, "false", "true or false, got 'false'"),
        (Fields.flag, 0, "true or false, got 0"),
        (Fields.text, 7, "a string, got 7"),
        (Fields.texts, "lm_head", "a list, got 'lm_head'"),
        (Fields.texts, ["a", 1], "a list of strings, got 1"),
        (Fields.integers, [128, None], "an integer >= 0, got null"),
        (Fields.inner, [1], "a JSON object, got a list of 1"),
        (Fields.each, dict(a=1), "a JSON object, got 1"),
    ],
)
def test_another_kind(read: Callable[..., Any], value: Any, text: str) -> None:
    fields = Fields(dict(inner=dict(key=value)), "a/config.json").required_inner("inner")
    with pytest.raises(ValueError, match=rf"^inner\.key(\.a)? in a/config\.json: expected {text}"):
        read(fields, "key")


def test_what_is_shown_is_short() -> None:
    for value in ("x" * 10**6, [0] * 10**6, {str(i): i for i in range(1000)}, 10**6000, object()):
        assert len(shown(value)) < 60


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(a=1)))
    assert read_fields(path) == dict(a=1)
    path.write_text('{"limits": [0.0, Infinity], "scale": NaN}')
    assert read_fields(path)["limits"] == [0.0, float("inf")]
    with pytest.raises(ValueError, match=r"^scale in .*config\.json: expected a finite number"):
        read_fields(path).number("scale")
    for text, got in (("[" * 10**6, "nested too deep"), ("9" * 5000, "digits"), ("[]", "a list")):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json: expected .*JSON.*, got .*{got}"):
            read_fields(path)
