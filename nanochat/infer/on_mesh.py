"""A trained model that outgrows a chip, on all chips of this machine, each with its parts of the weights."""
import signal
import sys
from dataclasses import dataclass

from nanochat.common import BadInput, flag
from nanochat.device import tpu
from nanochat.device.mesh import ONE_CHIP, Mesh
from nanochat.device.ranks import compute_cleanup, compute_init, prepare_libtpu
from nanochat.run.processes import begin_with_parent, expected_world_size, run_as_ranks


@dataclass(frozen=True)
class MeshFlags:
    mesh_fsdp: int = flag(1, "chips that divide the weights and gather one layer's at a time", at_least=1)
    mesh_tensor: int = flag(1, "chips that divide heads, hidden units and vocabulary", at_least=1)

    def mesh(self, config, device_type, kernel):
        """Returns the Mesh of all chips of this machine for a model's config, or ONE_CHIP if the flags divide nothing.
        Raises BadInput if it does not fit the model, the chips or the kernel."""
        from nanochat.kernels.choose import get_kernels  # here, because torch takes seconds, which --help need not wait
        from nanochat.kernels.sharded import Sharding
        from nanochat.model.parts import require_parts
        if (self.mesh_fsdp, self.mesh_tensor) == (1, 1):
            return ONE_CHIP
        accelerator = tpu.detect_accelerator() if device_type == "tpu" else None
        if accelerator and tpu.parse_accelerator(accelerator).hosts > 1:
            raise BadInput(f"--mesh_fsdp={self.mesh_fsdp} --mesh_tensor={self.mesh_tensor}: a trained model runs on "
                           f"the chips of one host, and this one is part of a {accelerator}: leave both out, or copy "
                           "the checkpoint to a TPU of one host")
        chips = expected_world_size(device_type)
        parts = self.mesh_fsdp * self.mesh_tensor
        if chips % parts:
            instead = f"give two numbers whose product divides {chips}" if chips > 1 else "leave both out"
            raise BadInput(f"--mesh_fsdp={self.mesh_fsdp} --mesh_tensor={self.mesh_tensor} need {parts} chips or a "
                           f"multiple of that, and there are {chips} (device type {device_type}): {instead}")
        mesh = Mesh(chips // parts, self.mesh_fsdp, self.mesh_tensor)
        get_kernels(kernel, device_type, Sharding.of_mesh(mesh, config.vocab_size))
        require_parts(mesh, config)
        return mesh


def run_on_mesh(function, mesh, device_type):
    """Calls function(dist) here with one device, or as every rank of a Mesh that divides the weights. Returns the exit
    status. function: picklable, returns nothing. Call prepare_xla_environment first."""
    if not mesh.divides_weights:
        return _as_rank(function, device_type)
    prepare_libtpu(device_type)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends this process while it waits, and the ranks with it
    status = run_as_ranks(_as_rank, function, device_type, begin=begin_with_parent)
    if status is None:
        print("error: a process of this command was killed: has the machine too little memory?", file=sys.stderr)
        return 1
    return status


def _as_rank(function, device_type):
    dist = compute_init(device_type)
    try:
        function(dist)
    except BadInput:  # every rank raises it
        if dist.rank == 0:
            raise
        return 2
    compute_cleanup(dist)
    return 0
