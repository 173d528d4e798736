"""The text that a run reads: whether it can be used, and where the stages of a mixture begin."""
from nanochat.common import BadInput
from nanochat.data.cache import check_cache
from nanochat.data.mixture import open_mixture
from nanochat.data.shards import fingerprint, open_text


def check_data(flags):
    """Returns the fingerprint of the training data (None if synthetic), and lines about it, in the format of
    describe_plan. Raises BadInput for unusable data."""
    data = flags.data
    if data.synthetic_data:
        if data.fim_rate:
            raise BadInput(f"--fim_rate={data.fim_rate:g} needs text, and --synthetic_data has none: leave one out")
        return None, ()
    held_out = []
    if flags.record.eval_every > 0 or data.val_dir:
        for of_set in data.validation_sets().values():
            held_out += open_text(of_set, "val")
    lines = []
    if data.mixture:
        mixture = open_mixture(data)
        shards = mixture.shards
        found = mixture.fingerprint
    else:
        shards = open_text(data)
        found = fingerprint(shards)
    if bucket := check_cache([*shards, *held_out], data.num_lanes):
        lines.append(f"       data  {bucket}")
    return found, tuple(lines)


def stage_rows(mixture, plan, step, lane_states):
    """Returns the row of the run with which each stage of a Mixture begins, counted as the lanes do. lane_states: those
    after `step` steps, or None."""
    done = sum(state["rows"] for state in (lane_states or {}).values())
    firsts = [stage.first_step(plan.num_iterations) for stage in mixture.stages]
    return [done + plan.num_rows(step, first) if first > step else 0 for first in firsts]
