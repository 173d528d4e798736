"""What a run that resumes takes from its checkpoint before anything else: the architecture of its model."""
from pathlib import Path

from nanochat.checkpoint.format import META, list_checkpoints, load_meta, read_config, read_sums, sha256_of_files
from nanochat.model.config import GPTConfig, config_as_flags


def saved_meta(flags, directory):
    """Returns the Meta of the checkpoint in a run's directory whose model the run will have, or None if it does not
    resume from one here. Raises BadInput for a checkpoint that is whole and that this program cannot read."""
    if flags.run.resume != "auto" or directory is None:
        return None
    for path in reversed(list_checkpoints(directory)):
        # A damaged one is left to those who check it whole: they set it aside, and the run resumes from the one before.
        if _meta_is_whole(path):
            meta = load_meta(path)
            if meta.task != "language":  # which is refused later
                return None
            read_config(path, meta, GPTConfig)
            return meta
    return None


def _meta_is_whole(path):
    """Returns whether META of the checkpoint at `path` has the checksum with which it was saved."""
    file = Path(path) / META
    try:
        return read_sums(path).get(META) == sha256_of_files([file])[file]
    except OSError:
        return False


def kept_flags(flags, directory):
    """Returns the flags of the model, as arguments, that a run takes from its checkpoint because they are not given."""
    meta = saved_meta(flags, directory)
    if meta is None:
        return []
    saved = config_as_flags(GPTConfig(**meta.config))
    return [f"--{name}={value}" for name, value in saved.items() if getattr(flags.model, name) is None]
