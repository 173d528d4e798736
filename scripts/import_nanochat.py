"""Makes a checkpoint of this project of one of karpathy/nanochat's, to complete, evaluate or export it:

    python3 -m scripts.import_nanochat --model=d32/model_000650.pt --tokenizer_dir=d32 --run=d32
    python3 -m scripts.generate --checkpoint=d32 --tokenizer_dir=d32 --prompt='The capital of France is'

That works for the models that nanochat made until January 2026, d20, d32 and d34 of 2025 among them. Later ones have
value embeddings with gates of their own, which the model here does not have.
"""
import json
import pickle
import re
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nanochat.checkpoint.format import list_checkpoints
from nanochat.checkpoint.meta import Meta
from nanochat.checkpoint.saver import save_checkpoint
from nanochat.common import BadInput, expand_path, flag, read_flags, require_writable_dir, run_script
from nanochat.data.tokenizer import check_tokenizer, load_tokenizer
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from nanochat.train.flags import Flags as TrainFlags
from nanochat.train.flags import RunFlags
from nanochat.train.prepare import run_directory

# nanochat's names of a layer's weights, for those of layers.LayerWeights.
LAYER_NAMES = {"attn_q": "attn.c_q.weight", "attn_k": "attn.c_k.weight", "attn_v": "attn.c_v.weight",
               "attn_o": "attn.c_proj.weight", "mlp_in": "mlp.c_fc.weight", "mlp_out": "mlp.c_proj.weight"}

# The parts of a GPT that these models do not have.
NANOCHAT = {"window_pattern": "L", "key_shift": False, "layer_gates": False, "value_embeddings": "off"}


@dataclass(frozen=True)
class Flags:
    model: Path | None = flag(None, "nanochat's model_STEP.pt; its meta_STEP.json is in the same folder",
                              of=expand_path)
    run: str = flag("", "name of the run to make, of which this becomes the only checkpoint")
    tokenizer_dir: Path | None = flag(None, "folder of nanochat's tokenizer.pkl; default: "
                                      "$NANOCHAT_BASE_DIR/tokenizer if it exists, else the shipped one", of=expand_path)


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    if flags.model is None or not flags.run:
        raise BadInput("--model and --run are needed: name nanochat's model_STEP.pt, and the run to make of it")
    run_dir = run_directory(TrainFlags(RunFlags(flags.run)))
    if list_checkpoints(run_dir):
        raise BadInput(f"--run={flags.run} has checkpoints already ({run_dir}): choose another name")
    step, config = read_meta(flags.model)
    tokenizer = load_tokenizer(flags.tokenizer_dir)
    check_tokenizer(tokenizer, config.vocab_size)
    state = convert(read_weights(flags.model), config, flags.model)
    meta = Meta(step=step, config=asdict(config), tokenizer_sha256=tokenizer.sha256, data_fingerprint="imported",
                flags={}, rng="", is_pause=True)
    path = save_checkpoint(require_writable_dir(run_dir), state, {}, meta, num_lanes=0)
    print(f"{flags.model} is now {path}: it can be completed, evaluated and exported, and not trained further")


def read_meta(model):
    """Returns (step, GPTConfig) of the meta_STEP.json beside nanochat's model_STEP.pt. Raises BadInput."""
    name = re.fullmatch(r"model_(\d+)\.pt", model.name)
    if not name:
        raise BadInput(f"--model={model} is not named model_STEP.pt, such as model_000650.pt")
    path = model.with_name(f"meta_{name[1]}.json")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["model_config"]
        sizes = {"vocab_size": found["vocab_size"], "max_seq_len": found["sequence_len"],
                 **{name: found[name] for name in ("n_layer", "n_embd", "n_head", "n_kv_head")}}
        letters = found.get("window_pattern", "L")
    except OSError as error:
        raise BadInput(f"--model={model}: {path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"--model={model}: {path} is not nanochat's ({type(error).__name__} {error})") from None
    if not all(isinstance(size, int) and 0 < size < 2**31 for size in sizes.values()):
        raise BadInput(f"--model={model}: {path} has sizes that no model has: {sizes}")
    if set(letters) - {"L", "l"}:
        raise BadInput(f"--model={model} has attention windows ({letters}), which are a position longer in nanochat "
                       "than here: it cannot be imported")
    return int(name[1]), GPTConfig(**sizes, **NANOCHAT)


def read_weights(path):
    """Returns nanochat's {name: tensor}. Raises BadInput if the file cannot be read."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {name.removeprefix("_orig_mod."): tensor for name, tensor in state.items()}
    except (OSError, ValueError, RuntimeError, EOFError, AttributeError, pickle.UnpicklingError,
            zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0][:200]
        raise BadInput(f"--model={path} cannot be read ({reason}): copy it again") from None


def convert(state, config, path):
    """Returns the weights of a GPT, fp32, of nanochat's `state`. Raises BadInput for what a GPT here does not have."""
    rows = config.vocab_size  # nanochat's tables may be padded with rows for no token
    named = {"wte": state.pop("transformer.wte.weight", None), "lm_head": state.pop("lm_head.weight", None)}
    found = {name: table[:rows] for name, table in named.items() if table is not None}
    found["resid_scale"] = state.pop("resid_lambdas", torch.ones(config.n_layer))
    found["x0_scale"] = state.pop("x0_lambdas", torch.zeros(config.n_layer))
    for ours, theirs in LAYER_NAMES.items():
        layers = [state.pop(f"transformer.h.{i}.{theirs}", None) for i in range(config.n_layer)]
        if all(layer is not None for layer in layers):
            found[ours] = torch.stack([layer.float() for layer in layers])
    for name in ("cos", "sin"):  # computed from the config
        state.pop(name, None)
    if state:
        raise BadInput(f"--model={path} has {min(state)}, which the model here does not have: only nanochat's models "
                       "from before value embeddings (January 2026) can be imported")
    for name, expected in GPT.on_meta(config).state_dict().items():
        if name not in found or found[name].shape != expected.shape:
            shape = tuple(found[name].shape) if name in found else "missing"
            raise BadInput(f"--model={path} does not fit its meta file: {name} is {shape} and should be "
                           f"{tuple(expected.shape)}")
    return {name: tensor.float().contiguous() for name, tensor in found.items()}


if __name__ == "__main__":
    run_script(main)
