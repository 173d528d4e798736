"""Which idea is better, or was it luck? The runs of a table of flags, and the comparison of what they end with."""
