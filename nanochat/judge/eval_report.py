"""What an evaluation found: tables of scores, the comparison with another evaluation, a page with every sample."""
import html
from collections import defaultdict

from nanochat.judge.judge import PASSED, Verdict
from nanochat.judge.scores import compare, pass_at_k, score

PASS_AT_K = 10
ALL = "all"
STYLE = """body { font-family: sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } td, th { padding: 0.2em 0.8em; text-align: left; border-bottom: 1px solid #ddd; }
pre { background: #f6f6f6; padding: 0.6em; overflow-x: auto; margin: 0.3em 0 1em; } .written { background: #fff6d5; }
.passed { color: #17702b; } .failed { color: #a61b1b; } details { margin: 0.3em 0; } summary { cursor: pointer; }"""


def measures(records):
    """Returns {measure: {name of the problem or task: (value, weight)}} of the records of one evaluation."""
    by_name = defaultdict(list)
    for record in records:
        by_name[record["name"]].append(record)
    found = defaultdict(dict)
    for name, samples in by_name.items():
        greedy, drawn = samples[0], samples[1:]
        is_gap = "exact" in greedy
        if is_gap:
            found["exact match"][name] = float(greedy["exact"]), 1
            found["edit similarity"][name] = greedy["similarity"], 1
        if greedy["status"]:
            found["compiles"][name] = float(compiles(greedy)), 1
            if not is_gap or "/" in name:  # there are tests
                found["pass@1"][name] = float(greedy["status"] == PASSED), 1
        if drawn:
            found["compiles, drawn"][name] = mean(compiles(sample) for sample in drawn), 1
            passed = sum(sample["status"] == PASSED for sample in drawn)
            k = min(PASS_AT_K, len(drawn))
            found[f"pass@{k}, drawn"][name] = pass_at_k(len(drawn), passed, k), 1
        if "bits" in greedy:
            found["bits per byte"][name] = greedy["bits"], greedy["bytes"]
        if "bits_without_suffix" in greedy:
            found["bits per byte without suffix"][name] = greedy["bits_without_suffix"], greedy["bytes"]
    return dict(found)


def compiles(sample):
    return Verdict(sample["status"], "").compiles


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
                rows.append((measure, group, score(*zip(*chosen, strict=True))))
    return rows


def compare_results(records, others):
    """Returns [(measure, Difference)] of two evaluations of the same problems, each problem with itself."""
    first, second, rows = measures(records), measures(others), []
    for measure in [measure for measure in first if measure in second]:
        names = [name for name in first[measure] if name in second[measure]]
        if names:
            values = [[found[measure][name][0] for name in names] for found in (first, second)]
            rows.append((measure, compare(*values, [first[measure][name][1] for name in names])))
    return rows


def format_scores(rows):
    """Returns the lines of a table of scores."""
    return [f"{measure:<30} {group:<14} {score.mean:7.4f}  [{score.low:.4f}, {score.high:.4f}]  of {score.num_problems}"
            for measure, group, score in rows]


def format_differences(rows):
    return [f"{measure:<30} {found.mean:+.4f}  [{found.low:+.4f}, {found.high:+.4f}]  p = {found.p_value:.4f}"
            for measure, found in rows]


# -----------------------------------------------------------------------------
# The page


def make_page(settings, records, texts, differences=()):
    """Returns the page, HTML that refers to nothing outside of it.

    texts: {name: (what is before the sample, what is after it)}. differences: lines of format_differences.
    """
    by_name = defaultdict(list)
    for record in records:
        by_name[record["name"]].append(record)
    title = f"{settings['task']}: {settings['checkpoint']}"
    rows = "".join(f"<tr><td>{escape(measure)}<td>{escape(group)}<td>{score.mean:.4f}<td>{score.low:.4f} to "
                   f"{score.high:.4f}<td>{score.num_problems}" for measure, group, score in summarise(records))
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>",
             f"<h1>{escape(title)}</h1><table><tr><th>measure<th>of<th>mean<th>95% interval<th>problems{rows}</table>"]
    if differences:
        parts.append(f"<h2>Compared with the other evaluation</h2><pre>{escape(chr(10).join(differences))}</pre>")
    parts.append("<h2>Samples</h2>")
    parts += [show_problem(name, samples, *texts[name]) for name, samples in by_name.items()]
    shown = "".join(f"<tr><td>{escape(key)}<td>{escape(str(value))}" for key, value in settings.items())
    return "\n".join([*parts, f"<h2>Settings</h2><table>{shown}</table></html>\n"])


def show_problem(name, samples, before, after):
    passed = sum(sample["status"] == PASSED for sample in samples)
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
