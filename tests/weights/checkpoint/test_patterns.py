"""patterns.py: what patterns stand for, next to Python's `re`, and that no pattern takes long."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_megamoe.weights.checkpoint.patterns import matches

NAME = "model.language_model.layers.3.mlp.experts.0.gate_proj"


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("mlp", True),
        ("layers.3.mlp", True),
        ("layers.3.ml", False),
        ("gate", False),
        ("model.language_model.layers.3", True),
        ("model.layers.3", False),
        ("model.layers.3*", False),
        ("*.3.mlp.*", True),
        ("*layers.?.mlp", True),
        ("layers.[0-3].mlp", True),
        ("layers.[!0-2].mlp", True),
        ("layers.[012].mlp", False),
        ("layers.[3.mlp", False),
        ("*", True),
        ("re:model", True),
        ("re:language_model", False),
        (r"re:.*layers\.[0-9]+\.mlp\.experts\.\d+\.(gate|up)_proj$", True),
        (r"re:.*mlp\.(?!experts).*", False),
        (r"re:.*mlp\.(?=experts)(?P<rest>\w+)\.", True),
        (r"re:.*layers\.(?:3|4)\b", True),
        (r"re:.*layers\.3{1,2}\..*proj\Z", True),
        (r"re:.*layers\.3{2}\.", False),
        ("re:", True),
    ],
)
def test_matches(pattern: str, expected: bool) -> None:
    assert matches(pattern, NAME) is expected
    if pattern.startswith("re:"):
        assert bool(re.match(pattern[3:], NAME)) is expected


ATOMS = st.sampled_from(
    [
        "a",
        "b",
        ".",
        r"\.",
        r"\d",
        r"\w",
        r"\W",
        "[ab]",
        "[^a]",
        "[a-c.]",
        "^",
        "$",
        r"\b",
        r"\B",
        "1",
    ]
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("".join, st.lists(inner, min_size=1, max_size=4)),
        st.builds(lambda parts: f"({'|'.join(parts)})", st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda each, sign: f"(?:{each}){sign}",
            inner,
            st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}", "*?"]),
        ),
        st.builds(lambda each, sign: f"({sign}{each})", inner, st.sampled_from(["?=", "?!"])),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, st.text("ab.1c", min_size=1, max_size=8))
def test_like_pythons_re(expression: str, name: str) -> None:
    assert matches(f"re:{expression}", name) is bool(re.match(expression, name))


@pytest.mark.parametrize(
    "pattern",
    [
        "re:([a-z.0-9]+)+$X",
        "re:(a|a)*(a|a)*(a|a)*$X",
        "re:(.*)*(.*)*(.*)*(.*)*(.*)*X",
        "re:((((.+)+)+)+)+X",
        "re:.*.*.*.*.*.*.*.*.*.*X",
        "*a" * 200 + "X",
        "re:" + "(?:a?){1000}" + "a" * 100 + "X",
    ],
)
def test_patterns_on_which_backtracking_has_no_end(pattern: str) -> None:
    """They take a bounded number of steps, or are refused for it."""
    for name in (NAME, "a" * 100, ".".join("a" * 60)):
        assert not matches(pattern, name)


def test_too_many_steps() -> None:
    pattern = "re:" + "(?:" * 5 + ".{0,900}" + "){900}" * 5
    with pytest.raises(
        ValueError, match=r"pattern .*: expected a pattern that takes at most 20000"
    ):
        matches(pattern, "a" * 900)


@pytest.mark.parametrize(
    "expression, text",
    [
        ("(a", "expected a closing parenthesis, got its end"),
        ("a)", r"expected balanced parentheses, got '\)'"),
        ("[a", "expected more of the pattern, got its end"),
        ("a\\", "expected more of the pattern, got its end"),
        ("*a", r"expected something to repeat, got '\*a'"),
        ("a**", r"expected one repetition, got '\*'"),
        ("[b-a]", "expected a span of characters, from lower to higher"),
        ("a{2,1}", "expected repetitions from fewer to more"),
        ("a{1001}", "expected at most 1000 repetitions"),
        (r"(a)\1", "expected an escape of punctuation, or one of .*, got '1'"),
        ("(?<=a)b", r"expected a group, \(\?:...\), .* got '\?<=a\)b'"),
        ("(?i)a", r"expected a group, \(\?:...\), .* got '\?i\)a'"),
        ("(?P<a", "expected a group's name and >"),
        ("(" * 60, "expected at most 50 groups in each other"),
        ("a" * 2001, "expected at most 2000 characters, got 2004"),
    ],
)
def test_refused(expression: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"pattern 're:.*: {text}"):
        matches(f"re:{expression}", NAME)
