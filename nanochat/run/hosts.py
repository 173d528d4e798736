"""Which hosts a run has, which of them this machine is, and whether they are alike. A pod is a TPU with several hosts.

On a TPU the hosts follow from its type, and from $TPU_WORKER_HOSTNAMES and $TPU_WORKER_ID or the metadata server. These
variables override that:
    NANOCHAT_HOSTS        the hosts' addresses, separated by commas, the same list on all: "10.0.0.1,10.0.0.2"
    NANOCHAT_HOST_INDEX   which of them this machine is, counted from 0
    NANOCHAT_HOST_NAME    its name in messages; default: that of the machine
    NANOCHAT_POD_PORT     the port of the first host at which the others join it; default: 7690
"""
import hashlib
import http.client
import importlib.metadata
import json
import os
import platform
import re
import socket
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from nanochat.common import BadInput
from nanochat.device import tpu

PORT = 7690
PACKAGES = ("torch", "torch_xla", "libtpu", "jax", "numpy")
VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")  # which change the programs


@dataclass(frozen=True)
class Host:
    """This machine among the hosts of a run."""
    index: int
    addresses: tuple  # of all hosts; the first is the one that the others join
    name: str
    port: int = PORT

    @property
    def count(self):
        return len(self.addresses)

    @property
    def is_first(self):
        return self.index == 0


# Whoever knows best is asked first: the person, by NANOCHAT_HOSTS; then the TPU's own variables; last the metadata
# server of its VM. The PCI bus shows each host of a pod as a TPU of its own, and each would then train a run of its
# own, unnoticed. Hence the check of the number of hosts against the type of the whole TPU.
def this_host(device_type):
    """Returns the Host that this machine is, or None if the run has only one host. Raises BadInput if there are several
    and none is known to be this one. Sets $TPU_ACCELERATOR_TYPE on a pod if it is not set.

    device_type: as resolve_device_type returns it.
    """
    if addresses := _listed(os.environ.get("NANOCHAT_HOSTS", "")):
        return _host(addresses, os.environ.get("NANOCHAT_HOST_INDEX", ""), "NANOCHAT_HOST_INDEX")
    if device_type != "tpu":
        return None
    addresses = _listed(os.environ.get("TPU_WORKER_HOSTNAMES", ""))
    accelerator = _accelerator()
    hosts = tpu.parse_accelerator(accelerator).hosts if accelerator else 1
    if max(hosts, len(addresses)) == 1:
        return None
    index = os.environ.get("TPU_WORKER_ID", "")
    source = "TPU_WORKER_ID"
    if not addresses:  # "name:id:address,…", as torch_xla reads them
        endpoints = metadata("attributes/worker-network-endpoints").split(",")
        addresses = tuple(endpoint.split(":")[2] for endpoint in endpoints if endpoint.count(":") >= 2)
        index = metadata("attributes/agent-worker-number")
        source = "the metadata server's agent-worker-number"
    if len(addresses) != hosts:
        raise BadInput(f"a TPU of type {accelerator} has {hosts} hosts, and {len(addresses)} are named: set "
                       "TPU_ACCELERATOR_TYPE to the type of the whole TPU, and TPU_WORKER_HOSTNAMES to the addresses "
                       "of all of its hosts")
    return _host(addresses, index, source)


def _listed(text):
    return tuple(filter(None, text.replace(" ", "").split(",")))


def _accelerator():
    """Returns the accelerator string of the whole TPU, or None. Asks the metadata server, because the PCI bus shows the
    chips of this host only."""
    if not os.environ.get("TPU_ACCELERATOR_TYPE"):
        told = metadata("attributes/accelerator-type")
        try:
            if told and tpu.parse_accelerator(told).hosts > 1:
                os.environ["TPU_ACCELERATOR_TYPE"] = told
        except BadInput:  # a type that is not in the tables
            pass
    return tpu.detect_accelerator()


def _host(addresses, index, source):
    if len(addresses) == 1:
        return None
    if not (index.isascii() and index.isdigit() and int(index) < len(addresses)):
        raise BadInput(f"the run has {len(addresses)} hosts ({', '.join(addresses)}), and {source} is '{index}': set "
                       f"NANOCHAT_HOSTS to their addresses, and NANOCHAT_HOST_INDEX to a number from 0 to "
                       f"{len(addresses) - 1}")
    are_names = all(re.fullmatch(r"([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?", name) for name in addresses)
    if len(set(addresses)) < len(addresses) or not are_names:
        raise BadInput(f"the run's hosts are {', '.join(addresses)[:200]}: set NANOCHAT_HOSTS to one address for each, "
                       "and no address twice")
    port = os.environ.get("NANOCHAT_POD_PORT") or str(PORT)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise BadInput(f"NANOCHAT_POD_PORT={port} is not a port: give a number from 1 to {2**16 - 1}")
    name = os.environ.get("NANOCHAT_HOST_NAME") or socket.gethostname()
    return Host(int(index), addresses, name, int(port))


def metadata(key):
    """Returns the value of instance/`key` on Google Cloud's metadata server, or "" if it cannot be reached.
    $GCE_METADATA_HOST is the server's address, as in Google's own libraries."""
    server = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    request = urllib.request.Request(f"http://{server}/computeMetadata/v1/instance/{key}",
                                     headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().strip().decode(errors="replace")
    except (OSError, http.client.HTTPException):  # URLError is an OSError
        return ""


# Whether they are alike


# Each host traces and compiles the program for itself, and collectives meet only in equal programs. So whatever may
# change the program must be the same on all.
def describe(flags, device_type):
    """Returns what must be the same on all hosts before a run begins, {name: JSON value}."""
    about = {"device type": device_type, "code": code_version(Path(__file__).resolve().parents[2]),
             "Python": platform.python_version()}
    for package in PACKAGES:
        try:
            about[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            about[package] = "missing"
    for name in VARIABLES:
        about[f"${name}"] = os.environ.get(name, "")
    for name, value in flags.as_dict().items():
        about[f"--{name}"] = json.loads(json.dumps(value))  # as the other hosts receive it: a tuple becomes a list
    return about


def code_version(root):
    """Returns the beginning of a hash of the program's lines in the folder `root`."""
    digest = hashlib.sha256()
    for path in sorted([*root.glob("nanochat/**/*.py"), *root.glob("scripts/**/*.py")]):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def require_alike(names, found, advice):
    """Raises BadInput if hosts differ, with both values. names: of the hosts; found: {name: value} of each."""
    first = found[0]
    for name, other in zip(names[1:], found[1:], strict=True):
        differences = []
        for key in first | other:
            here = first.get(key)
            there = other.get(key)
            if here != there:
                differences.append(f"{key} is {_show(here)} on {names[0]} and {_show(there)} on {name}")
        if differences:
            raise BadInput(f"the hosts differ: {'; '.join(differences[:4])}: {advice}")


def _show(value):
    return "not given" if value in (None, "") else value
