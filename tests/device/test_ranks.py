"""Which device a run trains on."""
import pytest

from nanochat.common import BadInput
from nanochat.device.ranks import prepare_xla_environment, resolve_device_type
from nanochat.device.tpu import count_tpu_chips


@pytest.fixture
def pci_with_tpus(tmp_path):
    """A PCI bus as on a v5litepod-8 VM: eight TPU chips and a network card by Google."""
    for i, device_id in enumerate(["0x0063"] * 8 + ["0x0042"]):
        device = tmp_path / "pci" / str(i)
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0\n")
        (device / "device").write_text(device_id + "\n")
    return tmp_path / "pci"


def test_a_machine_with_tpus_trains_on_them(pci_with_tpus, monkeypatch):
    assert count_tpu_chips(pci_with_tpus) == 8
    monkeypatch.delenv("PJRT_DEVICE")
    assert resolve_device_type("auto", pci_with_tpus) == "tpu"
    assert resolve_device_type("xla", pci_with_tpus) == "xla"  # when told to
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(BadInput, match="8 TPU chips but PJRT_DEVICE=CPU"):
        resolve_device_type("auto", pci_with_tpus)


@pytest.mark.parametrize("devices", ["²", "٢", "0", "-1", "1.5", "", "99999"])
def test_a_number_of_cpu_devices_that_is_none_is_one_line(devices, monkeypatch):
    for name in ("CPU_NUM_DEVICES", "PJRT_DEVICE", "PJRT_CPU_ASYNC_CLIENT", "XLA_THREAD_POOL_SIZE"):
        monkeypatch.setenv(name, devices)  # so that what is set here is undone
    with pytest.raises(BadInput, match=f"CPU_NUM_DEVICES={devices} is not a number of devices"):
        prepare_xla_environment("xla")
