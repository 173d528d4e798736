"""What an evaluation found: tables of scores, the comparison with another evaluation, a page with every sample."""
import html
from collections import defaultdict

from nanochat.judge.gaps import Gap
from nanochat.judge.judge import PASSED, Verdict
from nanochat.judge.scores import compare, pass_at_k, score

PASS_AT_K = 10
ALL = "all"
MEASURES = {  # of each task, and their names in the table
    "functions": {"compiles": "compiles, greedy", "compiles, drawn": "compiles, drawn", "pass@1": "pass@1, greedy",
                  "pass@10, drawn": "pass@10, drawn", "bits per byte": "bits per byte of the solutions"},
    "infill_functions": {"exact match": "gaps in solutions: exact match", "edit similarity": "… edit similarity",
                         "compiles": "… compiles", "pass@1": "… pass@1", "bits per byte": "… bits per byte",
                         "bits per byte without suffix": "… bits per byte without the text after the gap"}}
STYLE = """body { font-family: sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } td, th { padding: 0.2em 0.8em; text-align: left; border-bottom: 1px solid #ddd; }
pre { background: #f6f6f6; padding: 0.6em; overflow-x: auto; margin: 0.3em 0 1em; } .written { background: #fff6d5; }
.passed { color: #17702b; } .failed { color: #a61b1b; } details { margin: 0.3em 0; } summary { cursor: pointer; }"""


def measures(records):
    """Returns {measure: {name of the problem or gap: (value, weight)}} of the records of one evaluation."""
    found = defaultdict(dict)
    for name, samples in by_name(records).items():
        for measure, value in measures_of(name, samples).items():
            found[measure][name] = value
    return dict(found)


def measures_of(name, samples):
    """Returns {measure: (value, weight)} of the records of one problem or gap: the greedy sample, and those drawn."""
    greedy, *drawn = samples
    is_gap = "exact" in greedy
    found = {}
    if is_gap:
        found["exact match"] = float(greedy["exact"]), 1
        found["edit similarity"] = greedy["similarity"], 1
    if greedy["status"]:
        found["compiles"] = float(compiles(greedy)), 1
        if not is_gap or "/" in name:  # there are tests
            found["pass@1"] = float(greedy["status"] == PASSED), 1
    if drawn:
        found["compiles, drawn"] = mean(compiles(sample) for sample in drawn), 1
        # pass_at_k estimates from n samples for any k up to n, so with few samples k is their number.
        k = min(PASS_AT_K, len(drawn))
        found[f"pass@{k}, drawn"] = pass_at_k(len(drawn), num_passed(drawn), k), 1
    if "bits" in greedy:
        found["bits per byte"] = greedy["bits"], greedy["bytes"]
    if "bits_without_suffix" in greedy:
        found["bits per byte without suffix"] = greedy["bits_without_suffix"], greedy["bytes"]
    return found


def by_name(records):
    """Returns {name of the problem or gap: its records}."""
    found = defaultdict(list)
    for record in records:
        found[record["name"]].append(record)
    return found


def compiles(sample):
    return Verdict(sample["status"], "").compiles


def num_passed(samples):
    return sum(sample["status"] == PASSED for sample in samples)


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def summarise(records):
    """Returns [(measure, group, Score)]: each measure over all problems, and over those of each group."""
    group_of = {record["name"]: record["group"] for record in records}
    groups = [ALL, *(group for group in dict.fromkeys(group_of.values()) if group)]
    rows = []
    for measure, found in measures(records).items():
        for group in groups:
            chosen = [found[name] for name in found if group in (ALL, group_of[name])]
            if chosen:
                values, weights = zip(*chosen, strict=True)
                rows.append((measure, group, score(values, weights)))
    return rows


def compare_results(records, others):
    """Returns [(measure, Difference)] of two evaluations of the same problems, each problem with itself."""
    first = measures(records)
    second = measures(others)
    rows = []
    for measure, values in first.items():
        others_values = second.get(measure, {})
        names = [name for name in values if name in others_values]
        if names:
            ours = [values[name][0] for name in names]
            theirs = [others_values[name][0] for name in names]
            weights = [values[name][1] for name in names]
            rows.append((measure, compare(ours, theirs, weights)))
    return rows


def format_scores(rows):
    """Returns the lines of a table of scores."""
    return [f"{measure:<30} {group:<14} {score.mean:7.4f}  [{score.low:.4f}, {score.high:.4f}]  of {score.num_problems}"
            for measure, group, score in rows]


def format_differences(rows):
    return [f"{measure:<30} {found.mean:+.4f}  [{found.low:+.4f}, {found.high:+.4f}]  p = {found.p_value:.4f}"
            for measure, found in rows]


def table(found):
    """Returns the lines of a Markdown table of several tasks. found: {task: records of code_eval}."""
    lines = ["| measure | | of |", "|---|---|---|"]
    for task, records in found.items():
        rows = {measure: score for measure, group, score in summarise(records) if group == ALL}
        for measure, name in MEASURES[task].items():
            if measure in rows:
                lines.append(f"| {name} | {show_score(measure, rows[measure])} | {rows[measure].num_problems} |")
    return lines


def show_score(measure, found):
    if "bits" in measure or "similarity" in measure:
        return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"
    return in_percent(found)


def in_percent(found):
    """Returns a Score in words."""
    return f"{100 * found.mean:.1f}% [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def write_report(out_dir, settings, records, items, others):
    """Prints the scores, and writes them and the page into a folder. items: the problems or Gaps of the records;
    others: records to compare with, or none."""
    scores = format_scores(summarise(records))
    print("\n".join(scores))
    differences = format_differences(compare_results(records, others)) if others else []
    if differences:
        print("\nthe difference to --against, each problem compared with itself:\n" + "\n".join(differences))
    page = make_page(settings, records, {item.name: around(item) for item in items}, differences)
    (out_dir / "page.html").write_text(page, encoding="utf-8")
    (out_dir / "scores.txt").write_text("\n".join([*scores, *differences]) + "\n", encoding="utf-8")
    print(f"\n{out_dir}: samples.jsonl, scores.txt, page.html")


def around(item):
    """Returns what the page shows before and after a sample of a problem or a Gap."""
    if isinstance(item, Gap):
        return item.prefix[-1500:], item.suffix[:1500]
    return item.prompt, item.closing()


# -----------------------------------------------------------------------------
# The page


def make_page(settings, records, texts, differences=()):
    """Returns the page, HTML that refers to nothing outside of it.

    texts: {name: (what is before the sample, what is after it)}. differences: lines of format_differences.
    """
    title = f"{settings['task']}: {settings['checkpoint']}"
    rows = "".join(f"<tr><td>{escape(measure)}<td>{escape(group)}<td>{score.mean:.4f}<td>{score.low:.4f} to "
                   f"{score.high:.4f}<td>{score.num_problems}" for measure, group, score in summarise(records))
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>",
             f"<h1>{escape(title)}</h1><table><tr><th>measure<th>of<th>mean<th>95% interval<th>problems{rows}</table>"]
    if differences:
        parts.append(f"<h2>Compared with the other evaluation</h2><pre>{escape(chr(10).join(differences))}</pre>")
    parts.append("<h2>Samples</h2>")
    parts += [show_problem(name, samples, *texts[name]) for name, samples in by_name(records).items()]
    shown = "".join(f"<tr><td>{escape(key)}<td>{escape(str(value))}" for key, value in settings.items())
    return "\n".join([*parts, f"<h2>Settings</h2><table>{shown}</table></html>\n"])


def show_problem(name, samples, before, after):
    passed = num_passed(samples)
    shown = "".join(show_sample(sample, before, after) for sample in samples)
    return (f"<details><summary><b>{escape(name)}</b> {escape(samples[0]['group'])}: "
            f"<span class={'passed' if passed else 'failed'}>{passed} of {len(samples)} passed</span></summary>"
            f"{shown}</details>")


def show_sample(sample, before, after):
    status = sample["status"] or "not judged, because the file does not compile by itself"
    which = "greedy" if sample["sample"] == 0 else f"drawn, number {sample['sample']}"
    message = f"<pre>{escape(sample['message'])}</pre>" if sample.get("message") else ""
    return (f"<p>{which}: <span class={'passed' if status == PASSED else 'failed'}>{escape(status)}</span></p>"
            f"<pre>{escape(before)}<span class=written>{escape(sample['text'])}</span>{escape(after)}</pre>{message}")


def escape(text):
    """Returns text for a page. What no page may contain, such as half a surrogate, becomes a replacement character."""
    return html.escape(str(text).encode(errors="replace").decode())
