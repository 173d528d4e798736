"""The dtypes in which weights and gradients travel along fsdp, read from traced programs."""
import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not (importlib.util.find_spec("libtpu") and importlib.util.find_spec("jax")),
                                reason="needs libtpu and jax: pip install '.[tpu]'")

TRAVELLING = """
import json, re
from jaxlib import xla_client
from nanochat.preflight.language import trace_run
from nanochat.preflight.trace import prepare_environment
from nanochat.train.flags import parse_flags
prepare_environment()
flags = ["--depth=2", "--model_dim=128", "--num_heads=1", "--max_seq_len=128", "--device_batch_size=1",
         "--kernel=chunked", "--total_batch_size=1024", "--num_iterations=10", "--mesh_fsdp=8"]
found = {}
for products in ("bfloat16", "int8"):
    program = trace_run(parse_flags([*flags, f"--products={products}"]), chips=8)[1]["micro_step"]
    text = xla_client.XlaComputation(program.hlo_proto).as_hlo_text()
    found[products] = [re.findall(rf"([a-z0-9]+)\\[[^=]*? {kind}\\(", text) for kind in ("all-to-all", "all-gather")]
print(json.dumps(found))
"""


def test_int8_gathers_8_bits_and_exchanges_what_bfloat16_does():
    """Its gradients are fp32. As such, those of 1.88B parameters would travel for longer than their products take."""
    process = subprocess.run([sys.executable, "-c", TRAVELLING], capture_output=True, text=True, timeout=300,
                             env={key: value for key, value in os.environ.items() if key != "CPU_NUM_DEVICES"})
    assert process.returncode == 0, process.stderr[-4000:]
    found = json.loads(process.stdout.splitlines()[-1])
    exchanged, gathered = found["int8"]
    assert exchanged == found["bfloat16"][0] and set(exchanged) == {"bf16"}
    assert gathered.count("s8") == found["bfloat16"][1].count("bf16") - 3  # the three tables travel in bfloat16
