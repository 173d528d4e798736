"""Compiles the programs of a training run for a TPU, on a machine that has none, and says whether they fit and what
they cost:

    python3 -m scripts.tpu_preflight --accelerator=v5litepod-8 --depth=16 --device_batch_size=8 --max_seq_len=1024

Every flag of base_train is accepted (python3 -m scripts.base_train --help). The programs are traced by base_train's own
functions and compiled by the real TPU compiler, libtpu. Memory is what the compiler allocated. Times are estimates: the
compiler's cycles, with the bodies of loops times their trip count and Pallas kernels by their FLOPs at the rate of the
matrix units; or the bytes that are moved over the bandwidth of HBM, if that is more.

Exit status: 0 it fits, 3 it does not, 2 for bad flags, 1 for a failure.
"""
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from nanochat.common import ArgumentParser, BadInput, run_script
from nanochat.device import tpu
from nanochat.device.tpu import GIB
from nanochat.preflight import compile as aot
from nanochat.preflight import estimate
from nanochat.train import flags

PROGRAMS = ("micro_step", "update", "evaluate")
DOES_NOT_FIT = 3


def parse_args(argv=None):
    """(own flags, base_train's flags)"""
    parser = ArgumentParser(prog="python3 -m scripts.tpu_preflight", description=__doc__)
    add = parser.add_argument
    add("--accelerator", required=True, help="v5litepod-8, v6e-4, v4-32 …")
    add("--json", metavar="FILE", help="write everything to FILE too; -: to standard output, and nothing else there")
    add("--programs", default=",".join(PROGRAMS), help="which to compile; without micro_step or update, no estimates")
    add("--find_batch", action="store_true",
        help="look for the largest --device_batch_size that fits, with and without --activation_checkpointing")
    add("--dump_dir", metavar="DIR", help="keep what was traced (HLO protos) and the optimised HLO text here")
    add("--jobs", type=int, default=2, help="compilers at a time")
    add("--timeout_s", type=int, default=1800, help="the most that one program may take to compile")
    add("--usd_per_chip_hour", type=float, help="price; default: the table in nanochat/tpu.py, spot and on demand")
    args, rest = parser.parse_known_args(argv)
    train_args = flags.parse_args(rest)
    unknown = set(args.programs.split(",")) - set(PROGRAMS)
    if unknown:
        raise BadInput(f"--programs={args.programs} is unknown: choose among {','.join(PROGRAMS)}")
    if args.jobs < 1 or args.timeout_s < 1:
        raise BadInput(f"--jobs={args.jobs} and --timeout_s={args.timeout_s} must be at least 1")
    return args, train_args


# -----------------------------------------------------------------------------
# The programs of a run, traced


class Programs:
    """base_train's model, optimizer and batch as placeholders, and the programs traced on them."""

    def __init__(self, train_args, chips):
        """`chips`: how many share the run. aot.prepare_environment() comes before."""
        import torch
        import torch_xla

        from nanochat.data.tokenizer import load_tokenizer
        from nanochat.device.ranks import Dist
        from nanochat.kernels.choose import get_kernels
        from nanochat.model.gpt import GPT
        from nanochat.model.optim import MuonAdamW
        from nanochat.train.plan import make_plan

        tokenizer = load_tokenizer(train_args.tokenizer_dir)
        self.args, self.token_bytes = train_args, tokenizer.token_bytes()
        self.plan = plan = make_plan(train_args, tokenizer.n_vocab, chips)
        self.dist = Dist("tpu", torch_xla.device(), world_size=plan.world_size)
        dtype = flags.compute_dtype(train_args, "tpu")
        self.model = GPT.on_meta(plan.config, get_kernels(train_args.kernel, "tpu"), dtype,
                                 train_args.activation_checkpointing)
        for module in self.model.modules():
            for name, p in module._parameters.items():
                module._parameters[name] = torch.nn.Parameter(aot.placeholder(p.shape, p.dtype))
            for name, buffer in module._buffers.items():
                module._buffers[name] = aot.placeholder(buffer.shape, buffer.dtype)
        self.optimizer = MuonAdamW(self.model, flags.optim_config(train_args), plan.total_batch_size,
                                   plan.num_iterations, dtype, self.dist,
                                   flags.is_sharded(train_args, "tpu"))
        self.loss_sum = torch.zeros((), device=self.dist.device)
        self.loss_scale = aot.placeholder((), torch.float32)
        aot.make_placeholders()  # what was set to zero so far

    def state(self):
        """name -> tensor: all that stays on the chip between programs."""
        parameters, masters = self.optimizer.parameters, self.optimizer.masters
        return parameters | {f"{name}.main_grad": p.main_grad for name, p in parameters.items()} \
            | {f"{name}.master": masters[name] for name, p in parameters.items() if masters[name] is not p} \
            | dict(self.model.named_buffers()) | self.optimizer.state \
            | {"loss_sum": self.loss_sum, "loss_scale": self.loss_scale}

    def resident_bytes(self):
        return {name: tensor.numel() * tensor.element_size() for name, tensor in self.state().items()}

    def memory_groups(self):
        """Bytes of weights, gradients, optimizer state and the rest."""
        groups = dict.fromkeys(("weights", "gradients", "optimizer", "other"), 0)
        for name, size in self.resident_bytes().items():
            group = "gradients" if name.endswith(".main_grad") else "weights" if name in self.optimizer.parameters \
                else "optimizer" if name in self.optimizer.state or name.endswith(".master") else "other"
            groups[group] += size
        return groups

    def trace(self):
        """name -> aot.TracedProgram. Everything runs twice: the first time may differ, as when a cache is filled."""
        step = [*["micro_step"] * min(self.plan.grad_accum_steps, 2), "update"]
        programs = aot.trace(2 * step, lambda: self._train(2 * step), self.state())
        return programs | aot.trace(["evaluate", "evaluate"], self._evaluate, self.state())

    def _train(self, names):
        import torch

        from nanochat.device.programs import one_program
        from scripts.base_train import micro_step
        args, device = self.args, self.dist.device
        rows = torch.zeros(args.device_batch_size, args.max_seq_len + 1, dtype=torch.int32)
        for name in names:
            with one_program(self.dist, name):
                if name == "micro_step":
                    micro_step(self.model, rows.to(device), self.loss_sum, self.loss_scale)
                else:
                    result = self.optimizer.update(self.optimizer.scheduled(1).to(device), self.loss_sum)
        return result

    def _evaluate(self):
        import torch

        from nanochat.data.loader import SyntheticLoader
        from nanochat.train.loss_eval import bits_per_byte
        args = self.args
        loader = SyntheticLoader(len(self.token_bytes), batch_size=args.device_batch_size, seq_len=args.max_seq_len,
                                 rank=0, world_size=self.plan.world_size, seed=0, state=None)
        with torch.no_grad():
            bits_per_byte(self.model, loader, 2 * args.device_batch_size * self.plan.world_size, self.token_bytes,
                          self.dist)


# -----------------------------------------------------------------------------
# The report


def preflight(args, train_args, say=print):
    """Report of all of `args.programs` as a JSON object. `say` is called with lines on the progress."""
    tpu_slice = tpu.parse_accelerator(args.accelerator)
    started = time.monotonic()
    programs = Programs(train_args, tpu_slice.chips)
    plan = programs.plan
    traced = [program for name, program in programs.trace().items() if name in args.programs.split(",")]
    trace_s = time.monotonic() - started
    say(f"traced {', '.join(program.name for program in traced)} in {trace_s:.0f} s; compiling for "
        f"{args.accelerator} ({tpu_slice.tpu.name} {tpu_slice.topology})")
    runs = {"micro_step": plan.grad_accum_steps, "update": 1, "evaluate": 0}
    report = {
        "accelerator": args.accelerator, "chips": tpu_slice.chips, "hosts": tpu_slice.hosts,
        "topology": tpu_slice.topology, "flags": vars(train_args), "kernel": programs.model.kernels.name,
        "plan": {"total_batch_size": plan.total_batch_size, "grad_accum_steps": plan.grad_accum_steps,
                 "num_iterations": plan.num_iterations, "flops_per_token": plan.flops_per_token,
                 "parameters": sum(plan.parameters.values())},
        "trace_s": trace_s, "usable_hbm_bytes": tpu_slice.tpu.usable_hbm_bytes,
        "memory": programs.memory_groups(), "programs": {}, "out_of_memory": {},
    }
    with tempfile.TemporaryDirectory(prefix="tpu_preflight_") as scratch:
        started, reports = time.monotonic(), []
        for program, compiled in aot.compile_programs(traced, tpu_slice, args.dump_dir or scratch, args.timeout_s,
                                                      args.jobs):
            say(f"{program.name}: {compiled.seconds:.0f} s" + (", does not fit" if compiled.out_of_memory else ""))
            if compiled.out_of_memory:
                report["out_of_memory"][program.name] = out_of_memory(compiled, program, programs, train_args)
                continue
            reports.append(estimate.report_program(program, compiled, runs[program.name], programs.resident_bytes(),
                                                   tpu_slice))
            report["programs"][program.name] = estimate.as_json(reports[-1])
        report["compile_wall_s"] = time.monotonic() - started
    peak = max((program.peak_bytes for program in reports), default=0)
    report["peak_bytes"] = peak or None
    report["fits"] = not report["out_of_memory"] and peak <= tpu_slice.tpu.usable_hbm_bytes
    if {"micro_step", "update"} <= report["programs"].keys():
        report["estimate"] = estimate.report_run(reports, plan, tpu_slice) | costs(args, plan, tpu_slice, reports)
    return report


def costs(args, plan, tpu_slice, reports):
    """USD of the run, on spot and on demand; None where the price is not known."""
    hours = estimate.report_run(reports, plan, tpu_slice)["hours"]
    prices = {name: tpu.usd_per_hour(args.accelerator, spot, args.usd_per_chip_hour)
              for name, spot in (("usd_spot", True), ("usd_on_demand", False))}
    return {name: None if price is None else price * hours for name, price in prices.items()}


def out_of_memory(compiled, program, programs, train_args):
    """What the compiler says of a program that does not fit."""
    needed, buffers = estimate.large_buffers(compiled.out_of_memory)
    needed += sum(programs.resident_bytes().values())  # the compiler's report is on temporaries
    config = programs.plan.config
    return {
        "needed_bytes": needed, "compile_s": compiled.seconds, "traced_instructions": program.instructions,
        "largest": [asdict(buffer) | {"what": name_buffer(buffer.shape, config, train_args)}
                    for buffer in buffers[:10]],
        "report": compiled.out_of_memory[:4000],
    }


def name_buffer(shape, config, train_args):
    """What an array is, told by its shape: "logits", "attention scores", … or "" if it could be anything."""
    dims = [int(side) for side in shape.partition("[")[2].rstrip("]").split(",") if side]
    tokens, seq_len = train_args.device_batch_size * train_args.max_seq_len, train_args.max_seq_len
    if config.vocab_size in dims and config.n_embd in dims:
        return "embedding or head"
    if config.vocab_size in dims:
        return "logits"
    if dims.count(seq_len) >= 2 and (config.n_head in dims or train_args.device_batch_size * config.n_head in dims):
        return "attention scores"
    size = 1
    for side in dims:
        size *= side
    if size % tokens == 0:
        return "activations of all layers" if dims[0] == config.n_layer else "activations"
    return "stacked weights" if dims and dims[0] == config.n_layer else ""


def advice(report, train_args):
    """Flags that would make it fit, likely ones first."""
    found = {buffer["what"] for oom in report["out_of_memory"].values() for buffer in oom["largest"][:5]}
    suggestions = []
    if report["kernel"] == "current":
        if found & {"attention scores", "logits"}:
            suggestions.append("--kernel=flash")
    if not train_args.activation_checkpointing and found & {"activations", "activations of all layers",
                                                            "attention scores", ""}:
        suggestions.append("--activation_checkpointing")
    if train_args.device_batch_size > 1:
        suggestions.append(f"--device_batch_size={train_args.device_batch_size // 2}")
    return suggestions or ["a smaller model", "a TPU with more memory"]


# -----------------------------------------------------------------------------
# The largest batch


def find_batch(args, train_args, say=print):
    """Largest --device_batch_size that fits, of those reached by doubling and halving the given one, without and with
    --activation_checkpointing, as a dict."""
    import argparse
    found, started, compiled = {}, time.monotonic(), 0
    for checkpointing in (False, True):
        best, too_large, tried = None, None, {}
        batch = train_args.device_batch_size
        while batch and batch not in tried:
            trial = argparse.Namespace(**vars(train_args) | {
                "device_batch_size": batch, "activation_checkpointing": checkpointing, "total_batch_size": -1})
            report = preflight(argparse.Namespace(**vars(args) | {"programs": "micro_step", "dump_dir": None}), trial,
                               say=lambda line: None)
            compiled += 1
            tried[batch] = report["peak_bytes"]
            say(f"--device_batch_size={batch}{' --activation_checkpointing' if checkpointing else ''}: "
                + (f"fits, {report['peak_bytes'] / GIB:.2f} GiB" if report["fits"] else "does not fit"))
            if report["fits"]:
                best = max(batch, best or 0)
            else:
                too_large = min(batch, too_large or batch)
            batch = batch * 2 if too_large is None else batch // 2
        found["with" if checkpointing else "without"] = {"largest": best, "peak_bytes": tried}
    return found | {"compilations": compiled, "seconds": time.monotonic() - started}


# -----------------------------------------------------------------------------
# For a person


def gib(num_bytes):
    return f"{num_bytes / GIB:.2f} GiB"


def describe(report, train_args):
    """The report as lines."""
    usable = report["usable_hbm_bytes"]
    lines = [f"memory of a chip ({gib(usable)} usable):"]
    lines += [f"  {gib(size):>10}  {name}" for name, size in report["memory"].items()]
    if report["programs"]:
        lines += ["", f"{'':>14}  {'peak':>10} {'temporary':>10} {'Mcycles':>8} {'HBM GB':>7} {'est. ms':>8} "
                  f"{'runs':>4} {'HLO':>6} {'compiled':>8} {'seconds':>7}"]
    for name, program in report["programs"].items():
        lines.append(f"{name:>14}  {gib(program['peak_bytes']):>10} {gib(program['temp_bytes']):>10} "
                     f"{program['cycles'] / 1e6:8.1f} {program['hbm_bytes'] / 1e9:7.1f} "
                     f"{1000 * program['estimated_s']:8.1f} {program['runs_per_step']:4} "
                     f"{program['traced_instructions']:6} {program['compiled_instructions']:8} "
                     f"{program['compile_s']:7.0f}")
    for name, program in report["programs"].items():
        for kind, (count, num_bytes, overlapped) in program["collectives"].items():
            lines.append(f"  {name}: {count} {kind}, {num_bytes / 1e6:.1f} MB, {overlapped / 1e6:.1f} of them while "
                         "other work goes on")
        if program["collectives"]:
            lines.append(f"  {name}: collectives est. {1000 * program['ici_s']:.1f} ms, and "
                         f"{1000 * program['overlapped_ici_s']:.1f} ms while other work goes on")
        if program["pallas_calls"]:
            lines.append(f"  {name}: {program['pallas_calls']} Pallas kernels, {program['pallas_flops'] / 1e12:.2f} "
                         "TFLOP, in the cycles at the rate of the matrix units")
        if program["pallas_uncounted"]:
            lines.append(f"  {name}: Pallas kernels of unknown cost, not counted: {program['pallas_uncounted']}")
    for name, program in report["programs"].items():
        if name != "micro_step":
            continue
        lines += ["", f"most expensive operations of {name} (estimates):"]
        lines += [f"  {1000 * line['estimated_s']:7.2f} ms {line['runs']:4} × {line['opcode']:<14} {line['source']}  "
                  f"{line['shape'][:60]}" for line in program["top_operations"]]
    for name, oom in report["out_of_memory"].items():
        lines += ["", f"{name} does not fit: it needs {gib(oom['needed_bytes'])}. Largest buffers:"]
        lines += [f"  {gib(buffer['bytes']):>10}  {buffer['what'] or 'a temporary':<26} {buffer['shape']:<28} "
                  f"{buffer['source']}" for buffer in oom["largest"]]
    if "estimate" in report:
        run = report["estimate"]
        cost = ", ".join(f"{run[key]:.0f} USD {name}" for key, name in (("usd_spot", "on spot"),
                                                                          ("usd_on_demand", "on demand"))
                         if run[key] is not None)
        plan = report["plan"]
        lines += ["", f"estimate: {1000 * run['step_s']:.0f} ms a step of {plan['total_batch_size']:,} tokens, "
                  f"{run['tokens_per_s']:,.0f} tokens/s, MFU {run['mfu']:.1%}; "
                  f"update {run['shares']['update']:.1%} of a step",
                  f"estimate: {run['hours']:.1f} h for {plan['num_iterations']:,} steps{cost and f', {cost}'}"]
    lines.append("")
    if report["fits"]:
        lines.append(f"fits: {gib(report['peak_bytes'])} of {gib(usable)} ({report['peak_bytes'] / usable:.0%})")
    else:
        lines.append(f"does not fit into {gib(usable)}. Try {', or '.join(advice(report, train_args))}")
    return lines


def main(argv=None):
    args, train_args = parse_args(argv)
    aot.require_packages()
    aot.prepare_environment()
    say = (lambda line: print(line, file=sys.stderr, flush=True)) if args.json == "-" else \
        (lambda line: print(line, flush=True))
    report = preflight(args, train_args, say)
    if args.find_batch:
        report["find_batch"] = find_batch(args, train_args, say)
    say("\n".join(describe(report, train_args)))
    if args.find_batch:
        found = report["find_batch"]
        say(f"largest --device_batch_size (doubled or halved): {found['without']['largest']}, with "
            f"--activation_checkpointing {found['with']['largest']}; {found['compilations']} compilations, "
            f"{found['seconds']:.0f} s")
    if args.json == "-":
        print(json.dumps(report, indent=1))
    elif args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))
    return 0 if report["fits"] else DOES_NOT_FIT


if __name__ == "__main__":
    run_script(main)
