"""What the compiler reports of a program that does not fit into a chip, and which flags would help."""
import re
from dataclasses import asdict, dataclass


@dataclass
class Buffer:
    """One large allocation in the compiler's report."""
    bytes: float
    shape: str
    source: str


def explain_out_of_memory(program, compiled, resident_bytes, name_buffer):
    """Returns a JSON object about a program that does not fit: the bytes that it needs, and its largest buffers.

    resident_bytes: of all tensors that stay on the chip. name_buffer: as in trace.Programs.
    """
    needed, buffers = large_buffers(compiled.out_of_memory)
    is_vmem = "memory space vmem" in compiled.out_of_memory  # of one operation, such as a Pallas kernel
    if not is_vmem:
        needed += resident_bytes  # the compiler's report covers temporaries only
    return {
        "memory": "vmem" if is_vmem else "hbm", "needed_bytes": needed,
        "compile_s": compiled.seconds, "traced_instructions": program.instructions,
        "largest": [asdict(buffer) | {"what": name_buffer(buffer.shape)} for buffer in buffers[:10]],
        "report": compiled.out_of_memory[:4000],
    }


def large_buffers(out_of_memory):
    """Reads the compiler's out-of-memory report. Returns the bytes that the program would need (0 if the report does
    not say) and a list of Buffer, the largest first."""
    needed = re.search(r"Used ([\d.]+[KMG]) of", out_of_memory) \
        or re.search(r"Allocation \(size=(\d+)\)", out_of_memory)
    buffers = []
    for entry in re.split(r"\n\s+\d+\. Size: ", out_of_memory)[1:]:
        shape = re.search(r"Shape: (\S+?)\{", entry)
        source = re.search(r'op_name="([^"]*)"', entry)
        buffers.append(Buffer(parse_size(entry.split()[0]), shape[1] if shape else "", source[1] if source else ""))
    if not buffers:
        for shape in re.findall(r"shape = '([^{']*)", out_of_memory):
            buffers.append(Buffer(parse_size(needed[1]), shape, ""))
    return parse_size(needed[1]) if needed else 0, sorted(buffers, key=lambda buffer: buffer.bytes, reverse=True)


def parse_size(text):
    """Returns the bytes that "24.25G", "31.0K", "512B" or "17179869184" stands for."""
    number, unit = re.fullmatch(r"([\d.]+)([BKMG]?)", text).groups()
    return int(float(number) * 1024 ** "BKMG".index(unit or "B"))


def advice(report):
    """Returns the flags that would make a run fit that does not, the most promising first. report: of make_report."""
    flags = report["flags"]
    found = set()
    for oom in report["out_of_memory"].values():
        if oom["memory"] == "vmem":
            return ["a shorter --max_seq_len", "--kernel=chunked"]
        found |= {buffer["what"] for buffer in oom["largest"][:5]}
    suggestions = []
    if report["kernel"] == "current" and found & {"attention scores", "logits"}:
        suggestions.append("--kernel=flash")
    if flags.get("activation_checkpointing") in ("none", "qkv") and found & {
            "activations", "activations of all layers", "attention scores", ""}:
        suggestions.append("--activation_checkpointing=all")
    if flags.get("device_batch_size", 1) > 1:  # puzzles have none
        suggestions.append(f"--device_batch_size={flags['device_batch_size'] // 2}")
    if report.get("chips", 1) > 1 and flags.get("mesh_fsdp") in (1, "auto") and report["kernel"] != "current":
        suggestions.append("the --mesh_fsdp that tpu_preflight --find_mesh finds")
    return suggestions or ["a smaller model", "a TPU with more memory"]
