"""docs/support.md and docs/converting.md say nothing that no test shows, and quote the errors of the code."""

import ast

import pytest
from refusal_pages import DEFINITION, LINK, Page, raised, rows_of

import import_rules


PAGES = {name: Page(import_rules.ROOT / "docs" / f"{name}.md") for name in ("support", "converting")}
RAISED = {
    "support": raised(import_rules.modeling_files()),
    "converting": raised(
        [
            *sorted((import_rules.ROOT / "conversion").glob("*.py")),
            import_rules.ROOT / "hysparse_hf" / "oracle_recall.py",
            import_rules.ROOT / "hysparse_hf" / "index_patterns.py",
        ]
    ),
}
# What a cell may say without a test: it makes no sense, or the second generation brings it.
WORDS_ALONE = {"–", "", "second generation"}

LABELS = [(name, label) for name, page in PAGES.items() for label in page.defined]
LISTED = [(name, *row) for name, page in PAGES.items() for row in page.listed]
PAIRS = [(name, refusal) for name, found in RAISED.items() for refusal in found]


@pytest.mark.parametrize(("name", "label"), LABELS)
def test_a_label_names_a_test_that_exists(name, label):
    assert PAGES[name].function_of(label).name.startswith("test_")


@pytest.mark.parametrize("name", PAGES)
def test_labels_are_defined_once_and_used(name):
    page = PAGES[name]
    assert {match["label"] for match in LINK.finditer(page.text)} == set(page.defined)
    assert len(DEFINITION.findall(page.text)) == len(page.defined) > 15


def test_every_cell_names_its_test():
    rows = rows_of(PAGES["support"].works)
    assert len(rows) > 40
    bare = [
        (row[0], cell)
        for row in rows
        for cell in row[1:]
        if cell not in WORDS_ALONE and LINK.sub("", cell).strip(" ,;")
    ]
    assert bare == [], "a cell is made of links to tests"


@pytest.mark.parametrize(("name", "listed"), [row[:2] for row in LISTED], ids=lambda value: str(value)[:80])
def test_a_listed_refusal_is_in_the_code(name, listed):
    assert any(refusal.begins_with(listed) for refusal in RAISED[name])


@pytest.mark.parametrize(("name", "refusal"), PAIRS, ids=lambda value: str(value)[:80])
def test_a_refusal_of_the_code_is_listed(name, refusal):
    assert any(refusal.begins_with(listed) for listed, _ in PAGES[name].listed), (
        f"add it to docs/{name}.md, with the test of it"
    )


@pytest.mark.parametrize(("name", "cell"), [(row[0], row[2]) for row in LISTED])
def test_a_refusal_names_a_test_of_an_error(name, cell):
    labels = [match["label"] for match in LINK.finditer(cell)]
    assert labels
    for label in labels:
        text = ast.unparse(PAGES[name].function_of(label))
        assert any(sign in text for sign in ("pytest.raises", "error", "assert_refused", "== 1"))
