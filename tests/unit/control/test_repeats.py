"""Events of one cause: told at once, then at most once a minute, none of them lost from the count."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from weightsync_operator.adapters.events import Repeats
from weightsync_operator.core.rounds import EventNote


def failed(words: str, culprit: str = "vllm-1") -> EventNote:
    return EventNote("Warning", "RoundFailed", words, f"{culprit}/PeerLate")


def test_ten_equal_failures_in_a_minute_are_told_once_and_then_counted():
    repeats = Repeats()
    told = [due for second in range(10) for due in repeats.due([failed("rank 3 is late")], 5.0 * second)]
    assert [(due.note.message, due.count) for due in told] == [("rank 3 is late", 1)]
    assert repeats.wait(45.0) == 15.0
    assert [due.count for due in repeats.due([], 60.0)] == [9]
    assert repeats.due([], 120.0) == [] and repeats.wait(120.0) == float("inf")


def test_the_same_cause_in_other_figures_is_the_same_again_and_its_newest_words_are_told():
    repeats = Repeats()
    repeats.due([failed("step 4 of 9, 1.2 s")], 0.0)
    assert repeats.due([failed("step 5 of 9, 1.3 s"), failed("step 6 of 9, 1.1 s")], 10.0) == []
    (due,) = repeats.due([], 61.0)
    assert (due.note.message, due.count) == ("step 6 of 9, 1.1 s", 2)


def test_another_culprit_is_another_cause():
    repeats = Repeats()
    assert len(repeats.due([failed("late"), failed("late", "vllm-2")], 0.0)) == 2


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from("ab"), st.text(max_size=3)), max_size=40))
def test_no_cause_is_told_twice_in_a_minute_and_every_one_is_counted(happened):
    repeats, now, told = Repeats(), 0.0, []
    for pause, culprit, words in happened:
        now += pause
        told += [(now, due) for due in repeats.due([failed(words, culprit)], now)]
    told += [(now + 61, due) for due in repeats.due([], now + 61)]
    for culprit in "ab":
        times = [when for when, due in told if due.note.cause.startswith(culprit)]
        assert all(later - earlier >= 60 for earlier, later in itertools.pairwise(times))
        counted = sum(due.count for _, due in told if due.note.cause.startswith(culprit))
        assert counted == sum(who == culprit for _, who, _ in happened)
