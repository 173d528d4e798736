"""The shapes that the Pallas kernels can run, for those that ask before jax is imported."""
from nanochat.common import BadInput

HEAD_DIM = 128  # also the width of the TPU's vector registers
SEGMENT = 2048  # positions that a kernel for longer sequences works on at a time
MAX_WHOLE = 4096  # positions of a sequence that fits into VMEM as a whole
MAX_SEQ_LEN = 32768


def require_shapes(kernel, config, device_type):
    """Raises BadInput if `kernel` is flash, and cannot run a GPTConfig's model on `device_type`."""
    head_dim, length = config.head_dim, config.max_seq_len
    if kernel == "flash" and (head_dim != HEAD_DIM or not is_length(length, 128 if device_type == "tpu" else 1)):
        raise BadInput(f"--kernel=flash has heads of {HEAD_DIM} and sequences of up to {MAX_WHOLE:,} in steps of 128 "
                       f"and up to {MAX_SEQ_LEN:,} in steps of {SEGMENT:,}, not heads of {head_dim} and {length}: "
                       "change --num_heads or --max_seq_len, or use --kernel=chunked")


def segment_of(length, max_whole):
    """Returns how many positions of a longer sequence a kernel works on at a time, if the chip has room for sequences
    of `max_whole` as a whole: half of that at most, because some sums are of all segments."""
    return next(segment for segment in range(max_whole // 2, 0, -128) if length % segment == 0)


def is_length(length, step=128):
    """Whether the kernels can run sequences of this length. step: that of lengths up to MAX_WHOLE."""
    return length % step == 0 if length <= MAX_WHOLE else length % SEGMENT == 0 and length <= MAX_SEQ_LEN
