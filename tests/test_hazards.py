"""Every hazard that the guarantees list has a test, and the page of hazards names it."""

from __future__ import annotations

from hazards import PAGE, listed_ids, marked_tests, page


def test_guarantees_and_markers_name_the_same_hazards() -> None:
    listed, marked = set(listed_ids()), set(marked_tests())
    assert sorted(listed - marked) == [], "without a test"
    assert sorted(marked - listed) == [], "not in docs/guarantees.md"


def test_the_page_of_hazards_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/hazards.py"
