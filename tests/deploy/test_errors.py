"""What the scripts make of gcloud's error messages: the real gcloud prints them, for answers of an emulated API."""
import subprocess

import pytest

from tests.deploy.conftest import ROOT

pytestmark = pytest.mark.slow
MISSPELT = (403, "PERMISSION_DENIED", "Permission denied on 'locations/us-wst4-a' (or it may not exist).")
DISABLED = (403, "PERMISSION_DENIED", "Cloud TPU API has not been used in project p before or it is disabled. Enable "
            "it by visiting https://console.example/tpu?project=p then retry; see Quota and `gcloud auth login`.")
ABORTED = (409, "ABORTED", "The request was in conflict with another; try again.")
EXPIRED = (401, "UNAUTHENTICATED", "Request had invalid authentication credentials.")
TOO_MANY = (429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Read requests' and limit 'per minute'.")


def why(laptop, *arguments):
    """Returns the reason and gcloud's words for the failure of `gcloud compute tpus tpu-vm …`."""
    script = f'. {ROOT}/deploy/lib/common.sh; tpu us-a "$@" || printf "%s: %s" "$(why)" "$(complaint)"'
    return subprocess.check_output(["bash", "-c", script, "bash", *arguments], text=True, env=laptop.env)


def test_the_reason_of_a_refused_request_is_read_by_its_code(laptop, cloud):
    for answer, reason in [
            (MISSPELT, "permanent"), (DISABLED, "permanent"), (ABORTED, "other"), (EXPIRED, "auth"),
            (TOO_MANY, "other"),
            ((400, "INVALID_ARGUMENT", "The runtime version is not known."), "permanent"),
            ((404, "NOT_FOUND", "Resource 'projects/p/locations/us-a/nodes/nano' was not found"), "not_found"),
            ((404, "NOT_FOUND", "The location projects/p/locations/us-a does not exist"), "permanent"),
            ((429, "RESOURCE_EXHAUSTED", "Quota limit 'TPUs' has been exceeded. Limit: 0"), "quota")]:
        cloud.broken = answer
        said = why(laptop, "describe", "nano")
        assert said.startswith(f"{reason}: ") and answer[2].rstrip(".") in said and len(said.splitlines()) == 1


def test_the_reason_of_a_failed_operation_is_its_last_error(laptop, cloud):
    for code, message, reason in [
            (8, 'There is no more capacity in the zone "us-a"', "stockout"), (8, "Quota 'TPUs' exhausted", "quota"),
            (3, "Reserved is bad", "permanent"), (7, "The service account may not", "permanent"),
            (13, "Try again", "other"), (16, "Log in", "auth")]:
        error = {"code": code, "message": message}
        cloud.create = lambda parent, *_, error=error: cloud.operation(parent, None, error)
        said = why(laptop, "create", "nano", "--accelerator-type=v6e-4", "--version=x", "--quiet")
        assert said == f"{reason}: {message} (code {code})"


def test_a_missing_project_and_a_wrong_flag_are_permanent(laptop, cloud):
    assert why(laptop, "describe", "nano", "--no-such-flag").startswith("permanent: unrecognized arguments")
    laptop.env.pop("CLOUDSDK_CORE_PROJECT")
    assert why(laptop, "describe", "nano").startswith("permanent: no project is set: --project")
    lines = laptop.run("status.sh", "nano", "--zones=us-a", status=2).splitlines()
    assert len(lines) == 1 and "no project is set: --project" in lines[0]


@pytest.mark.parametrize("answer, status", [(MISSPELT, 2), (DISABLED, 2), (ABORTED, 4), (EXPIRED, 4)])
def test_an_error_of_gcloud_ends_every_script_with_its_words_and_means_no_absent_vm(laptop, cloud, answer, status):
    cloud.broken = answer
    for verb in ("create.sh", "delete.sh", "push.sh", "status.sh"):
        output = laptop.run(verb, "nano", "--zones=us-a,us-b", status=status)
        assert answer[2].rstrip(".") in output and ("gcloud auth login): " in output) == (answer is EXPIRED)
    assert answer[2].rstrip(".") in laptop.run("list.sh", status=status)
    assert not [request for request in cloud.requests if request.startswith("DELETE")]


def test_create_says_why_the_creation_failed_in_each_zone(laptop, cloud):
    tries = []

    def create(parent, zone, name, body):
        tries.append(zone)
        return cloud.operation(parent, None, {"code": 3, "message": "Reserved is bad"} if zone == "us-a" else
                               {"code": 13, "message": "Internal error, try again"})

    cloud.create = create
    flags = ["nano", "--poll_s=0.1"]
    output = laptop.run("create.sh", *flags, "--zones=us-a,us-b", status=5)
    assert "us-a: Reserved is bad" in output and "us-b: Internal error, try again" in output
    assert "request issued" not in output and tries == ["us-a", "us-b"]
    output = laptop.run("create.sh", *flags, "--zones=us-a", status=2)
    assert output.endswith("error: us-a: Reserved is bad (code 3)\n")


def test_list_shows_the_vms_of_all_zones_each_at_the_price_of_its_type(laptop, cloud):
    flags = ["--poll_s=0.1"]
    laptop.run("create.sh", "one", "--zones=us-a", *flags)
    laptop.run("create.sh", "other", "--zones=eu-b", "--type=v6e-4", *flags)
    (laptop.home / "config.env").write_text("ZONES=us-a TYPE=v5litepod-8 USD_PER_HOUR=9.00\n")
    cloud.nodes["projects/p/locations/us-d/nodes/old"] = {
        **cloud.node("one"), "name": "projects/p/locations/us-d/nodes/old", "acceleratorType": "v2-8"}
    one, other, old, total = laptop.run("list.sh").splitlines()
    assert one.split()[:2] == ["one", "us-a"] and one.endswith(" 9.00 USD/h")
    assert other.split()[:2] == ["other", "eu-b"] and not other.endswith((" 9.00 USD/h", " ? USD/h"))
    assert old.split()[:2] == ["old", "us-d"] and old.endswith(" ? USD/h") and "price is not known" in total
    assert "9.00" not in laptop.run("create.sh", "third", "--type=v6e-4", "--dry_run")
    assert "9.00 USD an hour" in laptop.run("create.sh", "third", "--dry_run")


def test_a_vm_without_external_ips(laptop, cloud):
    vm = laptop.vm("nano", set_up=False)

    def connect(node):
        node["networkEndpoints"] = [{"ipAddress": vm.ip, "port": 8470}]

    cloud.connect = connect
    laptop.run("create.sh", "nano", "--zones=us-a", "--internal_ips", "--poll_s=0.1")
    assert cloud.node("nano")["networkConfig"]["enableExternalIps"] is False
    for worker in ("all", "0"):
        assert "--internal_ips" in laptop.run("push.sh", "nano", "--zones=us-a", f"--worker={worker}", status=2)
    assert "~/nanochat is now" in laptop.run("push.sh", "nano", "--zones=us-a", "--internal_ips")
    assert vm.ip in laptop.run("list.sh")


def test_the_status_of_no_vm_and_of_an_address_that_is_silent(laptop, cloud):
    assert "nano  absent" in laptop.run("status.sh", "nano", "--zones=us-a", status=3)
    assert "unreachable" in laptop.run("status.sh", "127.255.255.254", status=1)


def test_a_gcloud_that_hangs_is_ended_with_its_children(laptop):
    laptop.let_gcloud(f"sleep 300 &\necho $! >{laptop.home}/child\nsleep 301")
    laptop.env["GCLOUD_S"] = "1"
    assert why(laptop, "describe", "nano") == "other: gcloud gave no answer for 1 s, and was ended"
    said = laptop.run("delete.sh", "nano", "--zones=us-a", "--yes", status=4)
    assert "cannot tell whether nano exists: us-a: gcloud gave no answer for 1 s, and was ended" in said
    child = (laptop.home / "child").read_text().strip()
    state = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True).stdout
    assert state.strip()[:1] in ("", "Z"), "the process that gcloud started still runs"


PAGE = '<html><title>Login</title>\n<meta http-equiv="refresh" content="0;url=https://a.b"></html>'
READY = "READY|HEALTHY|1001|2026-11-28T10:00:00.123Z|v5litepod-8|192.0.2.1|10.0.0.2|True"


def test_an_answer_of_gcloud_that_is_no_description_says_nothing_about_the_vm(laptop):
    laptop.let_gcloud(f'echo "$*" >>{laptop.root}/calls; cat {laptop.root}/answer; exit')
    flags = ["nano", "--zones=us-west4-a", "--project=p"]
    (laptop.root / "answer").write_text(READY + "\n")
    looked = laptop.run("lib/look.sh", *flags, "--what=vm")
    assert "state=READY\n" in looked and "ips=192.0.2.1\n" in looked
    for answer in [PAGE, "", "0", "state: READY", "UNKNOWN" + READY[5:], "ready" + READY[5:], READY + "|more",
                   READY + "\n" + READY, READY.replace("1001", "1001;reboot"), READY[:20], "null", "{}",
                   READY.replace("192.0.2.1", "-oProxyCommand=x"), READY.replace("READY", "Deleted", 1),
                   "Permission denied"]:
        (laptop.root / "answer").write_text(answer + "\n")
        looked = laptop.run("lib/look.sh", *flags, "--what=vm")
        assert "state=unknown\n" in looked and "permanent=\n" in looked and "gcloud's answer is none" in looked
    for answer in (PAGE, ""):
        (laptop.root / "answer").write_text(answer + "\n")
        output = laptop.run("create.sh", *flags, status=4)
        assert "cannot tell whether nano exists: us-west4-a: gcloud's answer is none" in output
        assert not output.endswith(": \n") and " create " not in (laptop.root / "calls").read_text()
    (laptop.root / "answer").write_text(PAGE)
    assert "gcloud's answer is none" in laptop.run("list.sh", status=4)
