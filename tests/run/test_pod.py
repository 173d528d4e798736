"""The channel between hosts: who may join, who is named when one is lost, and how all come to the same end."""
import socket
import threading
import time
from contextlib import suppress

import pytest

from nanochat.common import BadInput, Outage
from nanochat.run.pod import END, Pod, PodError, membership
from nanochat.run.stopping import EXIT_STATUS
from nanochat.run.wire import Link
from tests.conftest import run_python
from tests.deploy.conftest import eventually
from tests.run.pods import joined_pods, make_pods, on_all


def die(pod):
    """As if its process was killed: it tells nobody of what follows."""
    pod._is_over.set()
    for channel in list(pod._channels.values()):
        channel._connection.shutdown(socket.SHUT_RDWR)


def test_all_hosts_hear_what_each_says():
    with joined_pods(3) as pods:
        assert all(pod.names == ["w0", "w1", "w2"] for pod in pods)
        for number in range(20):
            assert on_all(pods, lambda pod, number=number: pod.gather(f"number {number}", [pod.host.index, number])) \
                == [[[0, number], [1, number], [2, number]]] * 3


@pytest.mark.parametrize("status, late_s", [(0, 0.1), (EXIT_STATUS, 0)])
def test_all_hosts_end_with_the_status_of_the_first_also_those_that_hear_it_late(monkeypatch, status, late_s):
    tell = Pod._tell

    def tell_late(pod, index, message):
        time.sleep(late_s)
        tell(pod, index, message)

    with joined_pods(3) as pods:
        monkeypatch.setattr(Pod, "_tell", tell_late)
        assert on_all(pods, lambda pod: (pod.end(status if pod.host.is_first else 0), pod.close())) == \
            [(status, None)] * 3
        assert not any(pod.failure for pod in pods)


def test_a_host_that_fails_ends_all_with_its_name_its_reason_and_its_status():
    with joined_pods(3) as pods:
        assert pods[1].end(1, "rank 5 (process 7) was ended by SIGKILL") == 1
        eventually(lambda: all(pod.failure for pod in pods))
        assert {str(pod.failure) for pod in pods} == {"host w1: rank 5 (process 7) was ended by SIGKILL"}
        assert pods[0].end(0) == 1
        pods[2]._tell(0, {"kind": "value", "name": END, "value": 0})
        eventually(lambda: END in pods[2]._values)  # all hosts have said it, but the run has failed
        assert pods[2].end(0) == 1
        with pytest.raises(PodError, match="host w1: rank 5"):
            pods[2].gather("something", 1)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_host_whose_process_ends_is_named_on_all_others(lost):
    with joined_pods(3) as pods:
        die(pods[lost])
        others = [pod for pod in pods if pod is not pods[lost]]
        eventually(lambda: all(pod.failure for pod in others))
        assert all(f"host w{lost} has ended without a word" in str(pod.failure) and pod.failure.status == 1
                   for pod in others)


def test_a_host_that_falls_silent_is_named(monkeypatch):
    with joined_pods(3, lost_s=2, beat_s=0.1) as pods:
        time.sleep(2.5)
        assert not any(pod.failure for pod in pods)
        monkeypatch.setattr(pods[2], "_tell", lambda index, message: None)
        eventually(lambda: all(pod.failure for pod in pods))
        assert "host w2 has been silent for 2 s" in str(pods[1].failure)


def test_a_host_that_does_not_come_is_waited_for_and_named():
    pods = make_pods(3, join_s=2, lost_s=1, beat_s=0.1)
    found = on_all(pods[:2], Pod.join, {})
    assert "127.0.0.3 to say that they have joined" in str(found[0]) and isinstance(found[0], PodError)
    on_all(pods, Pod.close)
    assert isinstance(found[1], PodError)
    late = make_pods(2, join_s=0.5)[1]
    with pytest.raises(PodError, match=r"127\.0\.0\.1:.*start the run there"):
        late.join({})


def test_a_host_that_dies_before_all_have_joined_is_named_at_once():
    pods = make_pods(3)
    threading.Thread(target=on_all, args=[pods[:1], Pod.join, {}], daemon=True).start()
    pods[1]._reach_first()
    eventually(lambda: pods[0]._channels)
    die(pods[1])
    eventually(lambda: pods[0].failure)
    assert "host 127.0.0.2 has ended" in str(pods[0].failure)
    on_all(pods, Pod.close)


def test_strangers_are_sent_away_and_the_run_goes_on():
    with joined_pods(2) as pods:
        address = pods[0].host.addresses[0], pods[0].host.port
        pods[0].answer = lambda message: {"heard": message["word"]}
        assert pods[1].link.ask(kind="echo", word="hello") == {"heard": "hello"}
        for token in ("guess", "", None, 5):
            with pytest.raises((EOFError, OSError)):
                Link(pods[1].host, token).ask(kind="echo", word="hello")
        for own, text in (("127.0.0.9", b""), ("127.0.0.2", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
                          ("127.0.0.2", b"[]\n"), ("127.0.0.2", b"{}\n")):  # the first is no host of the run
            with socket.create_connection(address, timeout=30, source_address=(own, 0)) as connection:
                connection.sendall(text)
                with suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        again = Pod(pods[1].host)  # the same host, started twice
        with pytest.raises(PodError, match="host 1 .*: start the same command once") as error:
            again.join({})
        again.close()  # or it would end this process 30 s later
        assert error.value.status == 2 and pods[0].failure is pods[1].failure is None


def test_the_first_host_says_that_its_port_is_in_use():
    with joined_pods(2) as pods, pytest.raises(BadInput, match=f"join this one at 127.0.0.1:{pods[0].host.port}"):
        Pod(pods[0].host).join({})


@pytest.mark.parametrize("error, status", [(BadInput("no shards in /data"), 2), (Outage("an outage"), EXIT_STATUS),
                                           (RuntimeError("a bug"), 1)])
def test_an_error_before_training_ends_all_hosts_with_its_text(error, status):
    def work(host):
        with membership(host) as pod:
            pod.join({})
            if pod.host.index == 1:
                raise error
            pod.gather("that they are ready", True)

    found = on_all([pod.host for pod in make_pods(3)], work)
    assert found[1] is error
    assert all(isinstance(other, PodError) and other.status == status and str(other) == f"host w1: {error}"
               for other in (found[0], found[2]))


def test_a_process_that_hangs_ends_soon_after_the_run(tmp_path):
    """The main thread, which hangs here, could be waiting for a file system."""
    code = """
import time
from nanochat.run import pod
from nanochat.run.hosts import Host
from tests.run.pods import free_port
alone = pod.Pod(Host(0, ("127.0.0.1",), "w0", free_port()), pod.PodLimits(grace_s=0.2))
alone.join({})
alone.fail("the disk is broken", 1)
time.sleep(100)
"""
    process = run_python("-c", code)
    assert process.returncode == 1 and process.stderr == "error: host w0: the disk is broken\n"
