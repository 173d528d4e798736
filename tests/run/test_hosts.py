"""Which hosts a run has, and which this machine is: from variables, from the metadata server, or one alone."""
import socket
import threading

import pytest

from nanochat.common import BadInput
from nanochat.run import hosts
from nanochat.run.hosts import PORT, Host, this_host

ENDPOINTS = "unknown:unknown:10.0.0.7,unknown:unknown:10.0.0.8,unknown:unknown:10.0.0.9,unknown:unknown:10.0.0.10"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine called vm, without any of the variables and without a metadata server."""
    for name in ("NANOCHAT_HOSTS", "NANOCHAT_HOST_INDEX", "NANOCHAT_HOST_NAME", "NANOCHAT_POD_PORT",
                 "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-16")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    monkeypatch.setattr("socket.gethostname", lambda: "vm")


def test_an_answer_that_breaks_off_is_none(monkeypatch):
    """Its error is no OSError: it would end the thread that waits for the notice of a preemption."""
    def answer(listener):
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 10\r\n\r\nTR")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=[listener], daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{listener.getsockname()[1]}")
        assert hosts.metadata("preempted") == ""


OWN = {"NANOCHAT_HOSTS": "a, b", "NANOCHAT_HOST_INDEX": "1", "NANOCHAT_HOST_NAME": "me", "NANOCHAT_POD_PORT": "99"}


@pytest.mark.parametrize("device_type, variables, expected", [
    ("xla", {}, None), ("cpu", {}, None), ("cuda", {}, None),
    ("tpu", {"TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ("tpu", {"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4", "TPU_WORKER_ID": "2"},
     Host(2, ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"), "vm", PORT)),
    # Those for tests and users come first.
    ("tpu", {"TPU_WORKER_HOSTNAMES": "localhost"} | OWN, Host(1, ("a", "b"), "me", 99)),
    ("xla", OWN, Host(1, ("a", "b"), "me", 99))])
def test_variables_say_which_host_this_is_if_there_are_several(monkeypatch, device_type, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert this_host(device_type) == expected


def test_the_metadata_server_says_which_host_this_is(metadata, monkeypatch):
    metadata |= {"attributes/worker-network-endpoints": ENDPOINTS, "attributes/agent-worker-number": "3",
                 "attributes/accelerator-type": "v5litepod-16"}
    expected = Host(3, ("10.0.0.7", "10.0.0.8", "10.0.0.9", "10.0.0.10"), "vm", PORT)
    assert this_host("tpu") == expected
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE")  # the PCI bus shows this host's chips only
    assert this_host("tpu") == expected


@pytest.mark.parametrize("variables, words", [
    ({}, "v5litepod-16 has 4 hosts, and 0 are named"),
    ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, "v5litepod-16 has 4 hosts, and 2 are named"),
    ({"TPU_WORKER_HOSTNAMES": "a,b,c,d"}, "TPU_WORKER_ID is ''"),
    ({"NANOCHAT_HOSTS": "a,b", "NANOCHAT_HOST_INDEX": "2"}, "NANOCHAT_HOST_INDEX is '2'"),
    ({"NANOCHAT_HOSTS": "a,b", "NANOCHAT_HOST_INDEX": "0", "NANOCHAT_POD_PORT": "x"}, "NANOCHAT_POD_PORT=x is not"),
    ({"NANOCHAT_HOSTS": "a,a", "NANOCHAT_HOST_INDEX": "1"}, "hosts are a, a: .* no address twice"),
    ({"NANOCHAT_HOSTS": "a..b,c", "NANOCHAT_HOST_INDEX": "0"}, r"hosts are a\.\.b, c: "),
    ({"NANOCHAT_HOSTS": f"a,{300 * 'x'}", "NANOCHAT_HOST_INDEX": "0"}, "hosts are a, xxx"),
])
def test_what_cannot_be_a_pod_is_refused_with_what_to_do(monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=words):
        this_host("tpu")
