import pytest

from nanochat.common import BadInput
from nanochat.device import tpu


@pytest.mark.parametrize("accelerator, name, chips, hosts, topology", [
    ("v5litepod-1", "v5e", 1, 1, "1x1"),
    ("v5litepod-4", "v5e", 4, 1, "2x2"),
    ("v5litepod-8", "v5e", 8, 1, "2x4"),
    ("v5litepod-16", "v5e", 16, 4, "4x4"),
    ("v5litepod-256", "v5e", 256, 64, "16x16"),
    ("v6e-4", "v6e", 4, 1, "2x2"),
    ("v6e-8", "v6e", 8, 1, "2x4"),
    ("v4-8", "v4", 4, 1, "2x2x1"),
    ("v4-32", "v4", 16, 4, "2x2x4"),
    ("v4-64", "v4", 32, 8, "2x4x4"),
    ("v5p-16", "v5p", 8, 2, "2x2x2"),
    ("v5p-128", "v5p", 64, 16, "4x4x4"),
    ("v5e-8", "v5e", 8, 1, "2x4"), ("v5e-1", "v5e", 1, 1, "1x1"), ("v6e8", "v6e", 8, 1, "2x4"),
    ("V5LITEPOD_8", "v5e", 8, 1, "2x4"), ("tpu-v6e-4", "v6e", 4, 1, "2x2"), ("v5lite-4", "v5e", 4, 1, "2x2"),
    ("v5p-8", "v5p", 4, 1, "2x2x1"),
])
def test_accelerator_strings_mean_what_google_says(accelerator, name, chips, hosts, topology):
    assert tpu.parse_accelerator(accelerator) == (tpu.TPU_TYPES[name], chips, hosts, topology)


@pytest.mark.parametrize("accelerator", ["", "v5e", "v5litepod", "v5litepod-", "v5litepod-3", "v6e-2", "v6e-x", "v4-4",
                                         "v4-9", "v9-8", "v6e-08", "v6e-0", "v6e-" + 5000 * "9", "v6e-٤", "tpu", "v5-8",
                                         "tpu_v6_4"])
def test_accelerators_that_do_not_exist_are_refused(accelerator):
    with pytest.raises(BadInput, match="--accelerator="):
        tpu.parse_accelerator(accelerator)


def write_pci_devices(root, devices):
    for index, (vendor, device) in enumerate(devices):
        (root / str(index)).mkdir()
        (root / str(index) / "vendor").write_text(vendor + "\n")
        (root / str(index) / "device").write_text(device + "\n")


@pytest.mark.parametrize("device_id, chips, accelerator", [
    ("0x0063", 8, "v5litepod-8"), ("0x006f", 4, "v6e-4"), ("0x005e", 4, "v4-8"), ("0x0062", 4, "v5p-8"),
    ("0x0027", 4, None)])
def test_the_accelerator_is_detected_from_the_pci_bus(tmp_path, monkeypatch, device_id, chips, accelerator):
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    network_card = ("0x1ae0", "0x0042")
    write_pci_devices(tmp_path, [("0x8086", "0x1237"), network_card] + chips * [("0x1ae0", device_id)])
    assert tpu.detect_accelerator(tmp_path) == accelerator


def test_the_environment_knows_the_accelerator_better_than_the_bus(tmp_path, monkeypatch):
    assert tpu.detect_accelerator(tmp_path) is None
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-16")
    assert tpu.detect_accelerator(tmp_path) == "v5litepod-16"
    assert tpu.peak_flops_here("tpu") == 197e12 and tpu.peak_flops_here("cuda") is None
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v9")
    with pytest.raises(BadInput, match="TPU_ACCELERATOR_TYPE=v9 .*: give one of v4-N"):
        tpu.detect_accelerator(tmp_path)


def test_chips_are_found_where_the_bus_is_hidden(tmp_path, monkeypatch):
    def count():
        return tpu.count_tpu_chips(tmp_path / "hidden", tmp_path / "dev")

    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    (tmp_path / "dev/vfio").mkdir(parents=True)
    for name in ("vfio", "0", "1", "2", "3"):
        (tmp_path / "dev/vfio" / name).touch()
    assert count() == 0  # any device may be there
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-4")
    assert count() == 4
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE")
    for index in range(8):
        (tmp_path / f"dev/accel{index}").touch()
    assert count() == 8


@pytest.mark.parametrize("accelerator, spot, zone, usd", [
    ("v5litepod-8", True, "us-west4-a", 2.04), ("v5litepod-8", True, "us-east5-b", 4.80),
    ("v6e-4", True, "asia-northeast1-b", 1.70), ("v6e-4", False, "us-east5-a", 10.80), ("v4-8", True, None, None)])
def test_prices_come_from_the_table(accelerator, spot, zone, usd):
    assert tpu.usd_per_hour(accelerator, spot, zone) == (usd and pytest.approx(usd))


def test_without_a_zone_the_dearest_price_counts_and_an_unknown_zone_has_none():
    dearest = tpu.usd_per_hour("v6e-4", spot=True)
    zones = ["us-east5-b", "us-west1-c", "asia-northeast1-b", "europe-west4-a", "asia-south1-b"]
    assert dearest == max(tpu.usd_per_hour("v6e-4", spot=True, zone=zone) for zone in zones)
    for zone in ("us-wset4-a", "us", "southamerica-west1-a"):  # the last has a price on demand alone
        assert tpu.usd_per_hour("v6e-4", spot=True, zone=zone) is None
        assert tpu.chip_price("v6e-4", True, zone) == (dearest / 4, False)
    tpu.require_known_zone("v6e-4", "southamerica-west1-a")
    tpu.require_known_zone("v4-8", "us-central2-b")  # a type without prices
    with pytest.raises(BadInput, match="--zone=us-wset4-a: .*v6e-4 .* us-east5"):
        tpu.require_known_zone("v6e-4", "us-wset4-a")


def test_libtpu_gets_the_options_of_its_chip_that_are_not_set_already(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    v5e, v4 = tpu.parse_accelerator("v5litepod-16"), tpu.parse_accelerator("v4-512")
    exchanges = "--xla_tpu_enable_async_all_to_all=true"
    assert tpu.libtpu_init_args(v5e) == f"--xla_tpu_scoped_vmem_limit_kib=32768 {exchanges}"
    assert tpu.libtpu_init_args(tpu.parse_accelerator("v5litepod-32")) == "--xla_tpu_scoped_vmem_limit_kib=32768"
    assert exchanges in tpu.libtpu_init_args(tpu.parse_accelerator("v6e-256"))
    assert tpu.libtpu_init_args(v4).startswith(f"{exchanges} --xla_enable_async_all_gather=true")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1 --a=2")
    assert tpu.libtpu_init_args(v5e, {"b": 3}) == f"--xla_tpu_scoped_vmem_limit_kib=1 --a=2 --b=3 {exchanges}"
