"""The text that a run reads: whether it can be used, and how often a mixture reads each source."""
from nanochat.common import BadInput
from nanochat.data.cache import check_cache
from nanochat.data.mixture import open_mixture, tokens_in
from nanochat.data.shards import fingerprint, open_text
from nanochat.record.metrics import format_count


def check_data(flags, plan, tokenizer):
    """Returns the fingerprint of the training data (None if synthetic), and lines about it, in the format of
    describe_plan. Raises BadInput for unusable data."""
    data = flags.data
    if data.synthetic_data:
        if data.fim_rate:
            raise BadInput(f"--fim_rate={data.fim_rate:g} needs text, and --synthetic_data has none: leave one out")
        return None, ()
    held_out = []
    if flags.record.eval_every > 0 or data.val_dir:
        held_out = validation_shards(data)
    lines = []
    if data.mixture:
        mixture = open_mixture(data)
        shards = mixture.shards
        found = mixture.fingerprint
        lines += describe_mixture(mixture, plan, tokenizer)
    else:
        shards = open_text(data)
        found = fingerprint(shards)
    if bucket := check_cache([*shards, *held_out], data.num_lanes):
        lines.append(f"       data  {bucket}")
    return found, tuple(lines)


def validation_shards(data):
    """Returns the Shards of all validation sets of DataFlags. Raises BadInput."""
    shards = []
    for of_set in data.validation_sets().values():
        shards += open_text(of_set, "val")
    return shards


def stage_rows(mixture, plan, step, lane_states):
    """Returns the row of the run with which each stage of a Mixture begins, counted as the lanes do. lane_states: those
    after `step` steps, or None."""
    done = sum(state["rows"] for state in (lane_states or {}).values())
    firsts = [stage.first_step(plan.num_iterations) for stage in mixture.stages]
    return [done + plan.num_rows(step, first) if first > step else 0 for first in firsts]


def describe_mixture(mixture, plan, tokenizer):
    """Returns lines about a Mixture in the run of a Plan: its weights, and how often it reads each source."""
    weights = []
    for stage in mixture.stages:
        shares = []
        for source, weight in zip(mixture.sources, stage.weights, strict=True):
            if weight:
                shares.append(f"{source.name} {weight:.3g}")
        begin = stage.first_step(plan.num_iterations)
        since = f"from step {begin + 1:,} on " if begin else ""
        weights.append(since + ", ".join(shares))
    edges = [*(stage.first_step(plan.num_iterations) for stage in mixture.stages), plan.num_iterations]
    spans = [plan.tokens(begin, end) for begin, end in zip(edges, edges[1:], strict=False)]
    epochs = []
    for i, source in enumerate(mixture.sources):
        size = max(1, tokens_in(source, tokenizer))
        read = sum(tokens * stage.weights[i] for tokens, stage in zip(spans, mixture.stages, strict=True))
        epochs.append(f"{source.name}: {read / size:.1f} epochs of about {format_count(round(size))} tokens")
    return [f"    mixture  {'; '.join(weights)}", f"     epochs  {'; '.join(epochs)}"]


def mixture_lines(data, plan, tokenizer):
    """Returns describe_mixture of the DataFlags, for a machine that may lack the data; [] without a mixture."""
    if not data.mixture:
        return []
    try:
        mixture = open_mixture(data)
    except BadInput as error:
        return [f"how often the mixture reads its sources is unknown: {error}"]
    return describe_mixture(mixture, plan, tokenizer)
