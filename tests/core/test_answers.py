"""Answers are counted as a loop over the inputs would count them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from critical_neurons.core.answers import Answers, Change
from critical_neurons.core.documents import from_plain, to_plain

NAMED = st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=30).map(lambda rows: np.array(rows).T)


@given(NAMED)
def test_counts(named):
    before, after, labels = named
    answers = Answers.count(before, after, labels)
    rows = list(zip(before.tolist(), after.tolist(), labels.tolist(), strict=True))
    assert [each.label for each in answers.classes] == sorted(set(labels.tolist()))
    for each in answers.classes:
        mine = [row for row in rows if row[2] == each.label]
        assert each.inputs == len(mine)
        assert (each.before, each.after) == tuple(sum(row[at] == each.label for row in mine) for at in (0, 1))
    changed = [Change(place, label, one, two) for place, (one, two, label) in enumerate(rows) if one != two]
    assert list(answers.changes) == changed
    gained = sum(each.fate == "won" for each in answers.changes) - sum(
        each.fate == "lost" for each in answers.changes
    )
    assert gained == sum(each.after - each.before for each in answers.classes)
    assert from_plain(Answers, to_plain(answers)) == answers


def test_without_labels():
    answers = Answers.count(np.array([0, 1]), np.array([0, 2]), None)
    assert answers.classes == ()
    assert answers.changes == (Change(1, None, 1, 2),)
    assert answers.changes[0].fate == "other"
