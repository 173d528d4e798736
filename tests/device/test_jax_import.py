"""JAX beside torch_xla on a TPU VM, which this machine looks like to them: its PCI bus shows eight chips."""
import json
import os
import subprocess
import sys

import pytest

from tests.device.test_tpu import write_pci_devices

pytest.importorskip("jax")
pytest.importorskip("libtpu")

KERNEL = """
import glob, json, os, sys
from functools import partial
real_glob = glob.glob
glob.glob = lambda path: real_glob(path.replace("/sys/bus/pci/devices", sys.argv[1]))
from nanochat.device.xla_ops import import_jax
jax = import_jax()
assert jax._src.hardware_utils.num_available_tpu_chips_and_device_id()[0] == 8
from nanochat.kernels import pallas_attention
stack, table = jax.ShapeDtypeStruct((1, 1, 128, 128), "bfloat16"), jax.ShapeDtypeStruct((128, 128), "float32")
kernel = jax.jit(partial(pallas_attention.forward, windows=(), matrix_unit=128))
place = jax.ShapeDtypeStruct((2,), "int32")
kernel.trace(place, *[stack] * 3, table, table).lower(lowering_platforms=("tpu",))
print(json.dumps([os.environ["LIBTPU_INIT_ARGS"], list(jax._src.xla_bridge.backends())]))
"""


def test_on_a_tpu_vm_jax_writes_kernels_and_leaves_the_tpu_and_libtpus_options_alone(tmp_path):
    write_pci_devices(tmp_path, [("0x1ae0", "0x0063")] * 8)
    process = subprocess.run([sys.executable, "-c", KERNEL, str(tmp_path)], capture_output=True, text=True, timeout=300,
                             env=os.environ | {"JAX_PLATFORMS": "tpu,cpu", "LIBTPU_INIT_ARGS": "--a=1"})
    assert process.returncode == 0, process.stderr[-4000:]
    assert json.loads(process.stdout) == ["--a=1", ["cpu"]]
