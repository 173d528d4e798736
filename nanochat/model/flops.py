"""FLOPs of training a GPT, and model FLOPs utilisation."""


def matrix_parameters(config):
    """Returns how many parameters of a GPTConfig's model take part in matrix products: all but the embedding."""
    width, kv_width = config.n_embd, config.n_kv_head * config.head_dim
    layer = 2 * width * width + 2 * kv_width * width + 8 * width * width  # q and o, k and v, MLP
    return config.n_layer * layer + config.vocab_size * width


def flops_per_token(config, seq_len):
    """Returns the useful FLOPs per token of forward and backward together; recomputation does not count.

    Each matrix parameter takes 6: a multiplication and an addition, once forward and twice backward (Kaplan et al.
    2020, arXiv 2001.08361). Attention takes 12 × width for each position that a token attends to (PaLM, arXiv
    2204.02311, appendix B). PaLM counts all T positions; here only those count that the causal mask and the layer's
    window leave, which are (T + 1) / 2 on average without a window.
    """
    positions = sum(_mean_positions(seq_len, window or seq_len) for window in config.windows())
    return 6 * matrix_parameters(config) + 12 * config.n_embd * positions


def _mean_positions(seq_len, window):
    """Returns how many positions a token attends to on average: the mean of min(t, window) for t = 1 … seq_len."""
    window = min(window, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def mfu(tokens_per_s, flops_per_token, peak_flops_per_chip, chips):
    """Returns model FLOPs utilisation, 0 to 1, or None if the chip's peak (FLOP/s) is not known."""
    return None if peak_flops_per_chip is None else tokens_per_s * flops_per_token / (peak_flops_per_chip * chips)
