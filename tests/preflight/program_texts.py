"""The programs of a training run at depth 16 as text, without names and source lines, to compare them with those in
kept/. Who changes a program on purpose stores the new ones, and says so in the commit:

    python3 -m tests.preflight.program_texts            # writes tests/preflight/kept/
"""
import base64
import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

KEPT = Path(__file__).parent / "kept"
RUNS = [(accelerator, products) for accelerator in ("v5litepod-8", "v6e-4") for products in ("bfloat16", "int8")]


def trace(accelerator, products, path):
    """Writes the text of a run's programs to `path`. A process of its own traces them."""
    subprocess.run([sys.executable, "-m", "tests.preflight.program_texts", accelerator, products, path], check=True,
                   env=plain_environment(), timeout=600)


def plain_environment():
    """Returns the environment without the variables that change a run's programs."""
    return {name: value for name, value in os.environ.items()
            if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "LIBTPU_INIT_ARGS", "XLA_FLAGS")}


def read_kept(accelerator, products):
    return lzma.decompress((KEPT / f"{accelerator}-{products}.txt.xz").read_bytes()).decode()


def text_of_programs(accelerator, products):
    """Returns the text of a run's programs. Needs a new process, because tracing sets environment variables."""
    from nanochat.preflight.flags import prepare, read_preflight_flags
    own, flags = read_preflight_flags([f"--accelerator={accelerator}", "--depth=16", f"--products={products}"])
    prepare(own)
    from nanochat.preflight.language import trace_run
    _, programs = trace_run(flags, own.tpu_slice.chips)
    return "".join(f"{name}, donated {sorted(program.donated)}\n{text_of(program.hlo_proto)}\n"
                   for name, program in programs.items())


def text_of(proto):
    """Returns the text of a HloModuleProto: a line for each instruction, and those of the Pallas kernels after it."""
    from jaxlib import xla_client
    from jaxlib._jax import HloPrintOptions
    options = HloPrintOptions()
    options.print_metadata = options.print_program_shape = False
    options.print_backend_config = options.print_large_constants = True
    text = xla_client.XlaComputation(proto).get_hlo_module().to_string(options)
    text = re.sub(r"%[\w.-]+?\.(\d+)\b", r"%\1", text.partition("\n")[2])
    return re.sub(r"backend_config=(\{.*\})$", lambda found: text_of_kernel(json.loads(found[1])), text, flags=re.M)


def hash_of(text):
    """Returns a hash of the text of a module that is not optimised yet, without names of modules, source lines and
    layout: equal for the same program, wherever it was traced."""
    from nanochat.preflight.hlo import parse
    digest = hashlib.sha256()
    for computation in parse(text).computations.values():
        for i in computation.values():
            attributes = re.sub(r", metadata=\{[^}]*\}", "", i.attributes).strip()
            digest.update(repr((i.name, i.opcode, i.shape, i.operands, i.is_root, attributes)).encode())
    return digest.hexdigest()


def text_of_kernel(config):
    """Returns the backend_config of a custom call, with its Pallas kernel as text without source lines."""
    from jaxlib.mlir import ir
    body = config["custom_call_config"].pop("body")
    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(base64.b64decode(body))
        return f"{json.dumps(config)}\n{module.operation.get_asm(enable_debug_info=False)}"


def main(accelerator=None, products=None, path=None):
    if path:
        Path(path).write_text(text_of_programs(accelerator, products))
        return
    KEPT.mkdir(exist_ok=True)
    for run in RUNS:
        path = KEPT / f"{'-'.join(run)}.txt"
        trace(*run, path)
        Path(f"{path}.xz").write_bytes(lzma.compress(path.read_bytes(), preset=9))
        path.unlink()


if __name__ == "__main__":
    if len(sys.argv) not in (1, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])
