"""How long a run would take on a CPU, before it starts."""
import time

import torch

from nanochat.common import BadInput, say
from nanochat.kernels.choose import get_kernels
from nanochat.model.gpt import GPT
from nanochat.record.metrics import format_duration

SHORT_FLOPS = 1e14  # a CPU is done with a shorter run in minutes
DAY_S = 86400
FIRST_TRY = "--num_iterations=100 --max_seq_len=256 --device_batch_size=4 --total_batch_size=4096"


def require_time(plan, num_iterations):
    """Prints how long a long run takes on this CPU. Raises BadInput if that is more than a day and --num_iterations,
    -1 if it is not given, does not ask for it. plan: a Plan."""
    steps = plan.start.first_step, plan.num_iterations
    if plan.device_type not in ("cpu", "xla") or plan.flops(*steps) < SHORT_FLOPS:
        return
    seconds = seconds_of_row(plan.config) * plan.tokens(*steps) / plan.config.max_seq_len
    text = f"about {seconds / DAY_S:,.0f} days" if seconds > 2 * DAY_S else f"about {format_duration(seconds)}"
    if seconds > DAY_S and num_iterations == -1:
        raise BadInput(f"{plan.num_iterations:,} steps take {text} on this CPU: for a first try add {FIRST_TRY}, or "
                       f"give --num_iterations={plan.num_iterations} for all of them")
    say(f"{plan.num_iterations:,} steps take {text} on this CPU; for a first try add {FIRST_TRY}")


def seconds_of_row(config):
    """Returns the seconds of the forward and the backward pass of one row on this CPU."""
    model = GPT(config, get_kernels("current", "cpu"))
    model.init_weights()
    ids = torch.zeros((1, config.max_seq_len), dtype=torch.int64)
    begun = time.monotonic()
    model(ids, ids, reduction="mean").backward()
    return time.monotonic() - begun
