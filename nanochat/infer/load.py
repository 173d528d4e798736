"""Finds and loads the model of a checkpoint, to complete text or to evaluate."""
import hashlib

import torch
from safetensors import SafetensorError

from nanochat.checkpoint.meta import load_meta, read_language_config
from nanochat.checkpoint.on_disk import MODEL, SOURCE, find_problem, sha256_of_files, tensor_files
from nanochat.checkpoint.pieces import load_tensors, tensor_readers
from nanochat.common import BadInput
from nanochat.data.tokenizer import check_tokenizer, load_tokenizer
from nanochat.device.mesh import ONE_CHIP
from nanochat.infer.quantize import Int8GPT
from nanochat.kernels.choose import get_kernels
from nanochat.kernels.sharded import Sharding
from nanochat.model.parts import Parts
from nanochat.model.weights import shapes


def load_language_meta(path):
    """Returns the Meta of the checkpoint at `path`. Raises BadInput unless it is a language model."""
    meta = load_meta(path)
    if meta.task != "language":
        raise BadInput(f"{path} is of the task {meta.task}, not a language model: give a run of base_train")
    read_language_config(path, meta)
    if meta.source and not (path / SOURCE).exists():
        raise BadInput(f"checkpoint {path} is damaged ({SOURCE} is missing): use another one")
    return meta


def weights_of(path):
    """Returns the beginning of the checksum of a checkpoint's weights, their name in results. Raises BadInput."""
    try:
        sums = list(sha256_of_files([path / name for name in tensor_files(path, MODEL)]).values())
    except OSError as error:
        raise BadInput(f"checkpoint {path} is damaged ({MODEL}: {error.strerror}): use another one") from None
    if len(sums) > 1:
        sums = [hashlib.sha256("".join(sums).encode()).hexdigest()]
    return sums[0][:16]


def load_model(path, dist, *, tokenizer_dir=None, kernel="auto", quantize="none", mesh=ONE_CHIP):
    """Returns (model, tokenizer, Meta) of the checkpoint at `path`; the model is on the device of `dist`, for
    evaluation.

    quantize: "none", or "int8": an Int8GPT, on the CPU only. mesh: if it divides the weights, this rank's parts are
    loaded. Raises BadInput if the weights are damaged, or the tokenizer differs from the one of training.
    """
    if quantize == "int8" and dist.device_type != "cpu":
        raise BadInput(f"--quantize=int8 is for the CPU, not for {dist.device_type}: leave it out, or add "
                       "--device_type=cpu")
    meta = load_language_meta(path)
    problem = find_problem(path, weights_only=True)
    if problem:
        raise BadInput(f"checkpoint {path} is damaged ({problem}): use another one")
    tokenizer = load_tokenizer(tokenizer_dir, path)
    check_tokenizer(tokenizer, meta.config["vocab_size"], meta.tokenizer_sha256)
    config = meta.model_config
    config = config.with_rows(config.context)  # a public model may have been adapted with shorter rows
    kernels = get_kernels(kernel, dist.device_type, Sharding.of_mesh(mesh, config.vocab_size))
    try:
        readers = tensor_readers(path, MODEL) if quantize == "int8" else {}
        state = load_tensors(path, MODEL)
        if {name: tuple(tensor.shape) for name, tensor in state.items()} != shapes(config):
            raise RuntimeError("its weights are not those of its config")
    except (OSError, RuntimeError, SafetensorError) as error:  # deleted meanwhile, or another config's
        raise BadInput(f"checkpoint {path} is damaged ({' '.join(str(error).split())[:200]}): use another "
                       "one") from None
    dtype = torch.bfloat16 if dist.device_type in ("tpu", "cuda") else torch.float32
    model = config.new_model(kernels, dtype)
    if quantize == "int8":
        # From the files, one weight at a time: those of the GPT take no memory, because nothing is written to them.
        return Int8GPT(model, lambda name: readers[name]().float()), tokenizer, meta
    model.load_state_dict(state, assign=True)
    parts = Parts(dist, mesh)
    for name, parameter in model.named_parameters():
        # Cast now: half of the bytes on a TPU, where every product would cast it first. A copy, because the file stays
        # mapped and may be overwritten.
        parameter.data = parts.of_model(name, parameter.data).to(dtype, copy=True)
    return model.to(dist.device).eval().requires_grad_(False), tokenizer, meta
