"""Reads the runs of an ablation: each variant of a TOML table of flags, as in scripts/ablate.py, with each seed."""
import json
import re
from dataclasses import dataclass

from nanochat.common import BadInput, written_whole
from nanochat.data.mixture import read_toml
from nanochat.data.shards import fingerprint
from nanochat.device.ranks import prepare_xla_environment, resolve_device_type
from nanochat.record.metrics import METRICS_FILE
from nanochat.run.processes import expected_world_size
from nanochat.train.flags import Flags, parse_flags
from nanochat.train.language import make_task
from nanochat.train.plan import Plan
from nanochat.train.prepare import FINISHED_FILE, run_directory
from nanochat.train.text import validation_shards

LONGEST_NAME = 100  # of a variant: file systems take names of 255 bytes
NOTES_FILE = "ablate.json"  # in a run's folder: its flags, and the CPU seconds of its processes
NOT_FOR_TABLES = ("run", "seed", "resume", "help")


@dataclass(frozen=True)
class Trial:
    """One run of the table."""
    variant: str
    seed: int
    argv: tuple  # the flags of base_train
    flags: Flags  # those of the model as its config settled them
    plan: Plan
    inputs: dict  # {name: hash} of the data and the tokenizer, which may change while the flags stay

    @property
    def directory(self):
        return run_directory(self.flags)

    def notes(self):
        """Returns what an earlier start wrote about this run, or {}."""
        try:
            return json.loads((self.directory / NOTES_FILE).read_text())
        except (OSError, ValueError):
            return {}

    def write_notes(self, cpu_s):
        """Notes the run's flags, inputs and CPU seconds in its folder; None while it runs, and if it was killed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with written_whole(self.directory / NOTES_FILE) as unfinished:
            unfinished.write_text(json.dumps({"flags": self.flags.as_dict(), "inputs": self.inputs, "cpu_s": cpu_s}))

    def is_finished(self):
        return (self.directory / FINISHED_FILE).exists()


def read_trials(path):
    """Returns the Trials of a table: all variants with the first seed, then with the second, and so on, to compare them
    early. Raises BadInput."""
    seeds, common, variants = read_table(path)
    plans = {}  # {variant: what plan_of returned}
    variant_of = {}  # {all flags of a run except --run, as text: its variant}
    trials = []
    for seed in seeds:
        for name, own in variants.items():
            argv = [*to_flags(common | own, f"{path}: variant {name}"), f"--run={path.stem}.{name}.{seed}",
                    f"--seed={seed}"]
            try:
                flags = parse_flags(argv)
                run_directory(flags)
                # The seed changes neither the plan nor the data that plan_of hashes: once for each variant is enough.
                if name not in plans:
                    plans[name] = plan_of(flags)
            except BadInput as error:
                raise BadInput(f"{path}: variant {name}: {error}") from None
            plan, inputs = plans[name]
            settled = flags.settled(plan.config)
            # Compared as settled: a flag given with its default value is the same as one left out.
            same = json.dumps(settled.as_dict() | {"run": None})
            if same in variant_of:
                raise BadInput(f"{path}: variants {variant_of[same]} and {name} are the same run: leave one out")
            variant_of[same] = name
            trials.append(Trial(name, seed, tuple(argv), settled, plan, inputs))
    return trials


def read_table(path):
    """Returns the seeds, the flags of all runs {name: value}, and {variant: {name: value}} of a TOML file."""
    table = read_toml(path)
    unknown = table.keys() - {"seeds", "flags", "variants"}
    if unknown:
        raise BadInput(f"{path}: {sorted(unknown)[0]} is unknown: a table has seeds, [flags] and [variants.NAME]")
    seeds = table.get("seeds", [0])
    common = table.get("flags", {})
    variants = table.get("variants", {})
    is_whole = isinstance(seeds, list) and all(type(seed) is int for seed in seeds)
    if not is_whole or not seeds or len(set(seeds)) < len(seeds):
        raise BadInput(f"{path}: seeds = {seeds} is not a list of different whole numbers, such as [0, 1, 2]")
    if not isinstance(common, dict):
        raise BadInput(f"{path}: flags = {common} is not a section: write [flags], and one flag per line below it")
    if not isinstance(variants, dict) or not variants or not all(isinstance(own, dict) for own in variants.values()):
        raise BadInput(f"{path} names no variants: add a section [variants.NAME] for each, with its flags below it")
    for name in variants:
        if not 1 <= len(name) <= LONGEST_NAME:
            raise BadInput(f"{path}: a variant's name has {len(name)} letters: give it 1 to {LONGEST_NAME}")
    return seeds, common, variants


def to_flags(values, where):
    """Returns {"depth": 4, "no_compile": True} as ["--depth=4", "--no_compile"]. where: for BadInput."""
    argv = []
    for name, value in values.items():
        if name in NOT_FOR_TABLES:
            raise BadInput(f"{where}: {name} is not for a table: leave it out")
        if not re.fullmatch(r"[a-z][\w-]*", name) or not isinstance(value, (bool, int, float, str)):
            raise BadInput(f"{where}: {name} = {value} is not a flag of base_train with a value, such as depth = 4")
        if value is False:
            raise BadInput(f"{where}: {name} = false: write \"off\" if the flag takes that, else leave it out")
        argv.append(f"--{name}" if value is True else f"--{name}={value}")
    return argv


def plan_of(flags):
    """Returns a run's Plan on this machine and its inputs, {name: hash}, after all checks that need no device. Raises
    BadInput."""
    device_type = resolve_device_type(flags.devices.device_type)
    prepare_xla_environment(device_type)
    if flags.record.eval_every < 0:
        raise BadInput("--eval_every=-1: a comparison needs evaluations, so give it a number of steps")
    # The table decides: the run must not take its architecture from an earlier checkpoint of that name.
    anew = flags.replace(resume="never")
    task = make_task(anew, device_type, expected_world_size(device_type), run_directory(flags))
    inputs = {"hash of the tokenizer": task.tokenizer.sha256}
    if not flags.data.synthetic_data:
        inputs |= {"hash of the data": task.data_fingerprint,
                   "hash of the validation": fingerprint(validation_shards(flags.data))}
    return task.plan, inputs


def require_same_flags(trial):
    """Raises BadInput if the run's folder belongs to a run with other flags, data or tokenizer."""
    if not (trial.directory / METRICS_FILE).exists():
        return
    notes = trial.notes()
    saved = notes.get("flags", {}) | notes.get("inputs", {})
    changed = []
    for name, value in (trial.flags.as_dict() | trial.inputs).items():
        if name in saved and saved[name] != value:
            changed.append(f"{name} {saved[name]} -> {value}")
    if changed or not saved:
        raise BadInput(f"{trial.directory} belongs to a run with other flags or data "
                       f"({', '.join(changed) or 'not of a table'}): give it the old values, rename the "
                       "variant or the table, or delete that folder")
