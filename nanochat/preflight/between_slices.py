"""What several slices that train one run would exchange: an estimate, because base_train trains on one.

A slice is connected by ICI, and slices by the data-centre network. Each slice reads its part of every batch. Once a
step, before the update, the gradients are summed: over ICI in each slice, after which a chip has a part of the sum;
between slices, each chip's part with its counterparts, through the network of the chip's host; and what the update
makes of it is gathered over ICI again. The first and the last are in the update of one slice, which is compiled. The
one between is estimated here as a ring, with nothing hidden and nothing for the way between chip and host:

    seconds = 2 (S - 1) / S × 4 P / H / B

for S slices of H hosts each, P parameters, whose gradients are fp32, and B bytes a second of a host's network.
"""
from nanochat.device import host_types


def exchange(parameters, slices, tpu_slice, gbps=None):
    """Returns a JSON object about the exchange of a step between `slices` tpu.Slices for so many parameters. gbps: of
    a host; by default what host_types knows."""
    gbps = gbps or host_types.dcn_gbps(tpu_slice)
    gradient_bytes = 4 * parameters
    sent = 2 * (slices - 1) / slices * gradient_bytes / tpu_slice.hosts
    return {"slices": slices, "gradient_bytes": gradient_bytes, "bytes_of_a_host": sent, "gbps_of_a_host": gbps,
            "seconds": 8 * sent / (gbps * 1e9)}


def describe(found):
    """Returns lines about an `exchange`."""
    return [f"between slices  {found['gradient_bytes'] / 1e9:.2f} GB of gradients in each of {found['slices']}; a host "
            f"sends {found['bytes_of_a_host'] / 1e9:.2f} GB at {found['gbps_of_a_host']:g} Gbit/s: est. "
            f"{1000 * found['seconds']:.1f} ms a step, not hidden",
            "  between slices: an estimate, base_train trains on one slice"]
