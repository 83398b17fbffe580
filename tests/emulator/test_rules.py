"""The record of tcgen05's broken rules: complete, of the sources as they are, each noticed."""

import json

import pytest

from emulator import build
from emulator.check_rules import RESULT, RULES

RECORDS = {record["rule"]: record for record in json.loads(RESULT.read_text())}


def test_every_rule_has_a_record():
    assert list(RECORDS) == [rule.name for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_is_in_the_source_and_was_noticed_when_broken(rule):
    assert (build.INTERPRETER / rule.file).read_text().count(rule.right) == 1
    assert RECORDS[rule.name]["seen"]
