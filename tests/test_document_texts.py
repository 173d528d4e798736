"""The documents are short, and agree with each other."""
import os
import re

from dev.figures import figures
from tests.test_documents import DOCUMENTS, ROOT, anchors, files, links
from tests.test_structure import CORE, ROOMS


def table_rows(text):
    """The rows of all tables of a Markdown text, each a list of cells."""
    lines = re.findall(r"^\|(.*)\|$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return [re.split(r"(?<!\\)\|", line) for line in lines]


def words_of(cell):
    """The words of a table's cell, as a reader sees them."""
    return re.sub(r"\]\([^)]*\)", "]", cell).split()


def paragraphs(text):
    """The paragraphs, list items and table rows of a Markdown text, outside of code blocks."""
    return re.split(r"\n\s*\n|\n(?=[-|] )", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def test_readme_and_changelog_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 60


def test_the_cells_of_the_tables_are_short():
    problems = []
    for document in DOCUMENTS:
        limit = 10 if document == "README.md" else 30
        cells = [cell for row in table_rows((ROOT / document).read_text()) for cell in row]
        problems += [f"{document}: {cell}" for cell in cells if len(words_of(cell)) > limit]
    assert not problems, "\n".join(problems)


def test_the_demo_ends_at_the_same_bits_per_byte_in_every_document():
    figures = (ROOT / "dev/DECISIONS.md").read_text()
    (result,) = re.findall(r"^\| demo: .*? \| [\d.]+, ([\d.]+) \|", figures, re.MULTILINE)
    said = [(document, paragraph) for document in DOCUMENTS if document != "dev/DECISIONS.md"
            for paragraph in paragraphs((ROOT / document).read_text())
            if re.search(r"\bdemo\b", paragraph, re.IGNORECASE) and "bits per byte" in paragraph]
    assert {"README.md", "CONTRIBUTING.md"} <= {document for document, _ in said}
    wrong = [f"{document}: {paragraph}" for document, paragraph in said if result not in paragraph]
    assert not wrong, "\n".join(wrong)


def test_every_term_of_the_glossary_is_linked_from_a_document():
    terms = anchors((ROOT / "docs/glossary.md").read_text()) - {"glossary"}
    linked = {os.path.relpath((ROOT / document).parent / target, ROOT) for document in DOCUMENTS
              for target in links((ROOT / document).read_text())}
    missing = {term for term in terms if f"docs/glossary.md#{term}" not in linked}
    assert not missing


def test_the_rows_that_the_preflights_reports_make_are_those_of_todays_figures():
    programs = {name: {"traced_instructions": 2000, "cycles": 1e8, "hbm_bytes": 2e10}
                for name in ("micro_step", "update", "evaluate")}
    run = {"step_s": 0.7, "step_low_s": 0.6, "step_high_s": 0.9, "tokens_per_s": 7e5, "mfu": 0.75,
           "shares": {"update": 0.03}}
    rows = figures({"programs": programs, "estimate": run, "peak_bytes": 2**33, "plan": {"total_batch_size": 524288}})
    assert rows["step of 524,288 tokens (its error bar)"] == "700 ms (600 to 900)"
    assert rows["tokens/s; MFU"] == "700,000; 75.0%" and rows["peak HBM, GiB"] == "8.00"
    table = (ROOT / "dev/DECISIONS.md").read_text()
    assert all(f"\n| {name} | " in table for name in rows)


def lines_of(path):
    """The lines of a Python file, or of all Python files in a folder."""
    found = [path] if path.suffix else path.rglob("*.py")
    return sum(len(file.read_text().splitlines()) for file in found)


def test_the_lines_that_the_readme_counts_are_right_to_a_tenth():
    """A folder may differ by 100 lines, because the README rounds."""
    text = (ROOT / "README.md").read_text()
    shown = [(name, int(lines.replace(",", ""))) for name, lines in
             re.findall(r"^ *([\w.]+)/? +([\d,]+)  ", text[text.index("## Where things are"):], re.MULTILINE)]
    core = [*CORE[:-1], "common.py"]
    sums = iter(sum(lines_of(ROOT / "nanochat" / name) for name in names) for names in (core, ROOMS))
    wrong = []
    for name, lines in shown:
        folder = ROOT / "scripts" if name == "scripts" else ROOT / "nanochat" / name
        actual = next(sums) if name == "nanochat" else lines_of(folder)
        if abs(lines - actual) > max(100, actual / 10):
            wrong.append(f"{name}: {lines}, {actual} now")
    assert len(shown) == len(CORE) + len(ROOMS) + 3 and not wrong, wrong


def test_every_message_that_troubleshooting_quotes_is_in_the_program():
    program = "".join((ROOT / path).read_text() for path in files() if path == "Makefile"
                      or path.startswith(("nanochat/", "scripts/", "deploy/")) and path.endswith((".py", ".sh")))
    program = re.sub(r'"\s*\n\s*f?"', "", program)  # a message may be divided among lines
    text = (ROOT / "docs/troubleshooting.md").read_text()
    parts = [part.strip() for quoted in re.findall(r'"([^"]+)"', text) for part in quoted.split("…")]
    missing = [part for part in parts if part not in program]
    assert parts and not missing, missing
