"""The fault matrix's table is whole, and its judge sees what must not be."""

from __future__ import annotations

import itertools

from tests.e2e.judge import LOADED, Heard, wrong
from tests.e2e.matrix import FAULTS, PHASES, SMOKE, TARGETS, Result, expected, not_run, runs, table

BOOK = {LOADED: [1, 1, 1], "step-1": [2, 2, 2], "step-2": [3, 3, 3]}


def heard(version: str, tokens: list[int], asked: float = 10.0, *, service: bool = True) -> Heard:
    return Heard(asked, asked + 0.1, service, "vllm-a", version, tuple(tokens))


# ---- the table ---------------------------------------------------------------------------------------------


def test_every_cell_is_run_once_or_has_a_reason() -> None:
    seen = [(fault, run.target, run.phase) for run in runs() for fault in run.faults]
    seen += [(cell.fault, cell.target, cell.phase) for cell in not_run()]
    assert sorted(seen) == sorted(itertools.product(FAULTS, TARGETS, PHASES))


def test_the_diagonal_has_every_fault_and_every_phase() -> None:
    diagonal = [run for run in runs() if run.id in SMOKE]
    assert len(diagonal) == len(SMOKE)
    assert {fault for run in diagonal for fault in run.faults} == set(FAULTS)
    assert {run.phase for run in diagonal} == set(PHASES)


def test_whoever_stays_hit_is_healed_by_hand_and_whoever_is_blamed_is_part_of_the_fleet() -> None:
    for run in runs():
        assert run.expected.lasting or run.expected.meanwhile != "none" or run.expected.new_run, run.id
        assert "cut" not in run.faults or run.expected.lasting, run.id


def test_a_decided_version_reaches_somebody_whatever_is_hit() -> None:
    for run in runs():
        if run.phase == "commit" and run.target not in ("operator", "api-server"):
            assert run.expected.meanwhile != "none", run.id


def test_the_table_shows_what_failed_what_is_not_run_and_what_was_not_reached() -> None:
    first, second, *_ = runs()
    result = Result(first.id, first.faults, first.target, first.phase, False, "all", trouble="a|b")
    text = table([result])
    assert "FAILED" in text and "a/b" in text and second.id in text
    assert all(cell.reason in text for cell in not_run())


def test_a_reason_is_given_in_words() -> None:
    assert "see vllm-server" in str(expected("cut", "vllm-worker", "join"))


# ---- the judge ---------------------------------------------------------------------------------------------


def test_an_answer_with_the_tokens_of_its_version_is_right() -> None:
    assert wrong([heard("step-1", [2, 2, 2])], BOOK, {"step-1"}, [(1.0, "step-1")]) == []


def test_tokens_of_another_version_are_wrong() -> None:
    [said] = wrong([heard("step-1", [3, 3, 3])], BOOK, {"step-1", "step-2"}, [])
    assert "its weights give [2, 2, 2]" in said


def test_a_flip_in_the_middle_of_an_answer_is_right_only_if_the_server_flipped() -> None:
    after = heard("step-2", [3, 3, 3], asked=11.0)
    decided = {"step-1", "step-2"}
    for tokens in ([2, 3, 3], [3, 3, 3]):
        across = heard("step-1", tokens, asked=10.0)
        assert wrong([across, after], BOOK, decided, []) == []
        assert len(wrong([across], BOOK, decided, [])) == 1
    assert len(wrong([heard("step-1", [7, 3, 3]), after], BOOK, decided, [])) == 1


def test_a_version_that_was_never_decided_must_not_be_served() -> None:
    [said] = wrong([heard("step-2", [3, 3, 3])], BOOK, {"step-1"}, [])
    assert "no decision" in said


def test_an_old_version_through_the_service_is_stale_once_all_have_the_new_one() -> None:
    old = heard("step-1", [2, 2, 2], asked=10.0)
    decided = {"step-1", "step-2"}
    [said] = wrong([old], BOOK, decided, [(2.0, "step-1"), (5.0, "step-2")])
    assert "stale" in said
    assert wrong([old], BOOK, decided, [(2.0, "step-1"), (9.0, "step-2")]) == []
    assert wrong([heard("step-1", [2, 2, 2], service=False)], BOOK, decided, [(5.0, "step-2")]) == []
