"""Compiles the programs of a training run for a TPU, on a machine that has none, and reports whether they fit into a
chip's memory and what they cost:

    python3 -m scripts.tpu_preflight --accelerator=v5litepod-8 --depth=16 --device_batch_size=8 --max_seq_len=1024

All flags of base_train are accepted too (python3 -m scripts.base_train --help). libtpu, the real TPU compiler, compiles
the programs that base_train runs. The memory is what the compiler allocated. The times are estimates: the cycles of the
machine's own schedule, or an operation's traffic with HBM if that takes longer, and the copies and collectives that
overlap with no operation. docs/preflight.md says how far to trust them.

Exit status: 0 if the run fits, 3 if it does not, 2 for bad flags, 1 for a failure.
"""
from nanochat.common import run_script, say
from nanochat.data.mixture import read_mixture
from nanochat.preflight.flags import prepare, read_preflight_flags


def main(argv=None):
    own, flags = read_preflight_flags(argv, __doc__)
    from nanochat.preflight.describe import deliver
    from nanochat.preflight.fit import require_searchable, search
    from nanochat.preflight.language import trace_run
    from nanochat.preflight.measured import find_checks
    from nanochat.preflight.report import make_report
    from nanochat.train.describe import describe_plan
    from nanochat.train.plan import make_plan
    from nanochat.train.start import run_tokenizer, with_start
    flags = with_start(flags)
    require_searchable(own, flags)
    if flags.data.mixture:
        read_mixture(flags.data.mixture)
    prepare(own)
    tokenizer = run_tokenizer(flags)
    plan = make_plan(flags, tokenizer.n_vocab, "tpu", own.tpu_slice.chips)
    checks = find_checks(own.measured, plan, own.tpu_slice)
    for line in describe_plan(plan, tokenizer):
        say(line)
    programs, traced = trace_run(flags, own.tpu_slice.chips)
    settled = flags.settled(programs.plan.config).as_dict()
    report = make_report(own, settled, programs, traced, checks)
    return deliver(own, report | search(own, flags))


if __name__ == "__main__":
    run_script(main, "tracing the programs")
