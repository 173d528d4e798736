"""The runs of an ablation: every variant of a table of flags, with every seed.

A table is a TOML file, whose keys are flags of base_train:

    seeds = [0, 1, 2]
    [flags]                # of all runs
    depth = 4
    [variants.default]     # the first one is the reference
    [variants.half]
    matrix_lr = 0.01
"""
import json
import re
from dataclasses import dataclass

from nanochat.common import BadInput
from nanochat.data.shards import fingerprint, open_text
from nanochat.device.ranks import prepare_xla_environment, resolve_device_type
from nanochat.record.metrics import METRICS_FILE
from nanochat.run.processes import expected_world_size
from nanochat.train.flags import Flags, parse_flags
from nanochat.train.language import make_task
from nanochat.train.plan import Plan
from nanochat.train.prepare import FINISHED_FILE, run_directory

LONGEST_NAME = 100  # of a variant: file systems take names of 255 bytes
NOTES_FILE = "ablate.json"  # in a run's folder: its flags, and the CPU seconds of its processes


@dataclass(frozen=True)
class Trial:
    """One run of the table."""
    variant: str
    seed: int
    argv: tuple  # the flags of base_train
    flags: Flags  # those of the model as they became in its config
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
        partial = self.directory / f"{NOTES_FILE}.tmp"
        partial.write_text(json.dumps({"flags": self.flags.as_dict(), "inputs": self.inputs, "cpu_s": cpu_s}))
        partial.replace(self.directory / NOTES_FILE)

    def settled(self):
        """Returns {name: value} of the flags but --run."""
        return self.flags.as_dict() | {"run": None}

    def is_finished(self):
        return (self.directory / FINISHED_FILE).exists()


def read_trials(path):
    """Returns the Trials of a table, variant after variant for the first seed, then for the second, and so on: so that
    there is something to compare early. Raises BadInput."""
    seeds, common, variants = read_table(path)
    plans, trials = {}, []
    for seed in seeds:
        for name, own in variants.items():
            argv = [*to_flags(common | own, f"{path}: variant {name}"), f"--run={path.stem}.{name}.{seed}",
                    f"--seed={seed}"]
            try:
                flags = parse_flags(argv)
                run_directory(flags)
                # The seed changes neither the plan nor the data, which plan_of hashes, so this is done once for each
                # variant.
                plans[name] = plans.get(name) or plan_of(flags)
            except BadInput as error:
                raise BadInput(f"{path}: variant {name}: {error}") from None
            plan, inputs = plans[name]
            trial = Trial(name, seed, tuple(argv), flags.settled(plan.config), plan, inputs)
            # Compared as settled: a flag that is given with its default value is the same as one that is left out.
            same = [other.variant for other in trials if other.settled() == trial.settled()]
            if same:
                raise BadInput(f"{path}: variants {same[0]} and {name} are the same run: leave one of them out")
            trials.append(trial)
    return trials


def read_table(path):
    """Returns the seeds, the flags of all runs {name: value}, and {variant: {name: value}} of a TOML file."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read as a table of TOML: {' '.join(str(error).split())}") from None
    unknown = table.keys() - {"seeds", "flags", "variants"}
    if unknown:
        raise BadInput(f"{path}: {sorted(unknown)[0]} is unknown: a table has seeds, [flags] and [variants.NAME]")
    seeds, common, variants = table.get("seeds", [0]), table.get("flags", {}), table.get("variants", {})
    is_whole = isinstance(seeds, list) and all(type(seed) is int for seed in seeds)
    if not is_whole or not seeds or len(set(seeds)) < len(seeds):
        raise BadInput(f"{path}: seeds = {seeds} is not a list of different whole numbers, such as [0, 1, 2]")
    if not isinstance(common, dict):
        raise BadInput(f"{path}: flags = {common} is not a section: write [flags], and one flag per line below it")
    if not isinstance(variants, dict) or not variants or not all(isinstance(own, dict) for own in variants.values()):
        raise BadInput(f"{path} names no variants: add a section [variants.NAME] for each, with its flags below it")
    for name in variants:
        if not 1 <= len(name) <= LONGEST_NAME:
            raise BadInput(f"{path}: a variant's name has {len(name)} letters ({name[:20]!r}): give it 1 to "
                           f"{LONGEST_NAME}")
    return seeds, common, variants


def to_flags(values, where):
    """Returns {"depth": 4, "no_compile": true} as ["--depth=4", "--no_compile"]. where: for BadInput."""
    argv = []
    for name, value in values.items():
        if name in ("run", "seed", "resume", "help"):
            raise BadInput(f"{where}: {name} is not for a table: leave it out")
        if not re.fullmatch(r"[a-z][\w-]*", name) or not isinstance(value, (bool, int, float, str)):
            raise BadInput(f"{where}: {name} = {value} is not a flag of base_train with a value: write for example "
                           "depth = 4")
        if value is False:
            raise BadInput(f"{where}: {name} = false: write \"off\" if the flag takes that, else leave it out")
        argv.append(f"--{name}" if value is True else f"--{name}={value}")
    return argv


def plan_of(flags):
    """Returns a run's Plan on this machine and its inputs, after all checks that need no device. Raises BadInput."""
    device_type = resolve_device_type(flags.devices.device_type)
    prepare_xla_environment(device_type)
    if flags.record.eval_every < 0:
        raise BadInput("--eval_every=-1: without evaluations there is nothing to compare")
    # The table says what a run is: an earlier checkpoint of that name must not lend it its architecture.
    anew = flags.replace(resume="never")
    task = make_task(anew, device_type, expected_world_size(device_type), run_directory(flags))
    inputs = {"hash of the tokenizer": task.tokenizer.sha256}
    if not flags.data.synthetic_data:
        inputs |= {"hash of the data": task.data_fingerprint,
                   "hash of the validation": fingerprint(open_text(flags.data, "val"))}
    return task.plan, inputs


def require_same_flags(trial):
    """Raises BadInput if the run's folder is of a run with other flags, data or tokenizer."""
    if not (trial.directory / METRICS_FILE).exists():
        return
    notes = trial.notes()
    saved, now = notes.get("flags", {}) | notes.get("inputs", {}), trial.flags.as_dict() | trial.inputs
    changed = [f"{name} {saved[name]} -> {now[name]}" for name in now if name in saved and saved[name] != now[name]]
    if changed or not saved:
        raise BadInput(f"{trial.directory} is of a run with other flags or data "
                       f"({', '.join(changed) or 'not of a table'}): give it the old values, rename the "
                       "variant or the table, or delete that folder")
