"""The shapes that the Pallas kernels can run, for those that ask before jax is imported."""
from nanochat.common import BadInput

HEAD_DIM = 128  # also the width of the TPU's vector registers
MAX_SEQ_LEN = 4096


def require_shapes(kernel, config, device_type):
    """Raises BadInput if `kernel` is flash, and cannot run a GPTConfig's model on `device_type`."""
    head_dim, length = config.head_dim, config.max_seq_len
    if kernel == "flash" and (head_dim != HEAD_DIM or length > MAX_SEQ_LEN or length % 128 and device_type == "tpu"):
        raise BadInput(f"--kernel=flash has heads of {HEAD_DIM} and sequences of up to {MAX_SEQ_LEN} in steps of 128, "
                       f"not heads of {head_dim} and {length}: change --num_heads or --max_seq_len, or use "
                       "--kernel=chunked")
