"""Data on a Hub, served on loopback: that of a commit, whatever its branch does, and one line for each refusal."""
import shutil
import threading

import numpy as np
import pytest
from huggingface_hub import constants

from nanochat.checkpoint.meta import load_meta
from nanochat.checkpoint.on_disk import list_checkpoints
from nanochat.common import BadInput, Outage
from nanochat.data import cache, hub_files, remote
from nanochat.data.hub_files import pinned
from nanochat.data.mixture import read_mixture
from nanochat.data.shards import fingerprint, list_shards, open_shards, whole_texts
from nanochat.data.storage import data_place
from nanochat.run.agreement import Requests
from nanochat.run.stopping import EXIT_STATUS
from nanochat.train.flags import parse_flags
from nanochat.train.prepare import REQUESTS_FILE
from scripts import ablate
from tests.conftest import add_records, last_of_each
from tests.corpus.projects import prepare, shard_hashes, stack_rows, write_table
from tests.data import elsewhere
from tests.data.documents import write
from tests.deploy.conftest import eventually
from tests.hub import Hub

REPO = "datasets/org/data"
URL = f"hf://{REPO}/corpus"


@pytest.fixture
def hub(monkeypatch, base_dir):
    hub = Hub()
    for name, value in hub.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "ENDPOINT", hub.env["HF_ENDPOINT"])
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(remote, "OUTAGE_S", 5)
    elsewhere.forget()
    yield hub
    hub.close()


@pytest.fixture
def folder(tmp_path):
    """A folder whose folder `corpus` has two shards, in a folder with a comma."""
    path, rng = tmp_path / "data", np.random.default_rng(0)
    (path / "corpus/a, b").mkdir(parents=True)
    for i in range(2):
        write(path / f"corpus/a, b/shard_{i}.parquet", [rng.bytes(5000).hex() for _ in range(40)], row_group_size=8)
    (path / "README.md").write_text("# Data\n")
    return path


def texts(place):
    return list(whole_texts(open_shards(list_shards(place))))


# -----------------------------------------------------------------------------
# The data of a commit


def test_shards_have_the_text_of_those_on_disk_and_a_fingerprint_with_the_commit(hub, folder):
    hub.page_size = 1
    first = hub.push_folder(REPO, folder)
    assert texts(URL) == texts(folder / "corpus") and "Bearer hf_secret" in hub.tokens
    assert pinned(URL) == f"hf://{REPO}@{first}/corpus"
    (folder / "README.md").write_text("# The same shards\n")
    second = hub.push_folder(REPO, folder)
    places = [folder / "corpus", f"hf://{REPO}@{first}/corpus", f"hf://{REPO}@{second}/corpus"]
    assert len({fingerprint(open_shards(list_shards(place))) for place in places}) == 3
    assert fingerprint(open_shards(list_shards(URL))) == fingerprint(open_shards(list_shards(places[1])))


@pytest.mark.parametrize("branch, revision", [("v1.0", "v1.0"), ("refs/convert/parquet", "refs/convert/parquet"),
                                              ("a/b", "a%2Fb")])
def test_a_revision_is_named_as_huggingface_hub_names_it(hub, folder, branch, revision):
    hub.push(REPO, {"x": b""})
    commit = hub.push(REPO, {"corpus/x.parquet": (folder / "corpus/a, b/shard_0.parquet").read_bytes()}, branch)
    assert pinned(data_place(f"hf://{REPO}@{revision}/corpus/")) == f"hf://{REPO}@{commit}/corpus"
    assert len(texts(f"hf://{REPO}@{revision}/corpus")) == 40


def test_each_place_of_a_flag_keeps_the_commit_that_it_has_in_a_checkpoint(hub):
    one, two, now = "1" * 40, "2" * 40, hub.push(REPO, {"x": b""})
    saved = f"a=hf://{REPO}@{one}/a,b=hf://{REPO}@{two}/a/b"
    assert pinned(f"c=hf://{REPO}/a/b,a=hf://{REPO}@v1/a,d=hf://{REPO}/x,e=e", saved) == \
        f"c=hf://{REPO}@{two}/a/b,a=hf://{REPO}@{one}/a,d=hf://{REPO}@{now}/x,e=e"
    assert pinned(f"hf://{REPO}@{two}/a", saved) == f"hf://{REPO}@{two}/a" and pinned(None, saved) is None
    data = parse_flags([f"--data_dir=hf://{REPO}/a", f"--val_dir=hf://{REPO}/x"]).at_commits({"data_dir": saved}).data
    assert (data.data_dir, data.val_dir) == (f"hf://{REPO}@{one}/a", f"hf://{REPO}@{now}/x")


@pytest.mark.slow
def test_a_run_that_is_stopped_resumes_on_a_new_machine_with_the_same_losses_after_its_branch_has_moved(
        hub, corpus_dir, tiny, base_dir, tmp_path, warm_ranks, reference):
    """The new machine knows the commit only from the mirror, and can read what the branch has become."""
    commit = hub.push_folder(REPO, corpus_dir)
    flags = ["--num_iterations=24", "--eval_every=12", "--log_every=1", "--save_every=1000"]
    directory = base_dir / "checkpoints/hub"

    def run(status):
        process = warm_ranks(2).call(elsewhere.main, last_of_each(
            *tiny, *flags, "--run=hub", f"--data_dir=hf://{REPO}/train", f"--val_dir=hf://{REPO}/val",
            f"--checkpoint_mirror={tmp_path / 'mirror'}"))
        assert process.returncode == status, process.stderr
        return add_records(process, directory)

    def stop():
        """Asks the run to stop, as its parent process does after SIGTERM, once it has logged step 3."""
        metrics = directory / "metrics.jsonl"
        eventually(lambda: metrics.exists() and '"step": 3,' in metrics.read_text())
        Requests(directory / REQUESTS_FILE).ask_to_stop()

    expected = reference(*flags, devices=2)  # first: once its ranks are warm, the next run logs step 3 soon
    threading.Thread(target=stop, daemon=True).start()
    first = run(EXIT_STATUS)
    hub.push(REPO, {f"{split}/x.parquet": (corpus_dir / "val/shard_00000.parquet").read_bytes()
                    for split in ("train", "val")})
    shutil.rmtree(directory)
    second = run(0)
    assert "resuming from" in second.stdout and len(expected.losses) == 24 and expected.bpb
    assert (first.losses | second.losses, first.bpb | second.bpb) == (expected.losses, expected.bpb)
    saved = load_meta(list_checkpoints(directory)[-1]).flags
    assert saved["data_dir"] == f"hf://{REPO}@{commit}/train" and saved["val_dir"] == f"hf://{REPO}@{commit}/val"
    config = (directory / "run.toml").read_text()
    assert f"hf://{REPO}@{commit}/train" in config and "hf_secret" not in second.stdout + second.stderr + config


def test_the_corpus_of_a_data_set_is_that_of_its_copy_on_disk(hub, tmp_path):
    write_table(tmp_path / "mine/data/cpp/a.parquet", stack_rows("a", 30))
    write_table(tmp_path / "mine/data/cpp/b.jsonl", stack_rows("b", 4))
    commit = hub.push_folder(REPO, tmp_path / "mine")
    hub.cuts = [1000, 0]
    prepare(tmp_path / "disk", f"--source={tmp_path}/mine/data/cpp")
    found = prepare(tmp_path / "hub", f"--source=hf://{REPO}/data/cpp")
    assert shard_hashes(tmp_path / "hub") == shard_hashes(tmp_path / "disk")
    assert found["sources"][0]["origin"] == f"hf://{REPO}@{commit}/data/cpp"
    num_asked = len(hub.asked)
    found = prepare(tmp_path / "file", f"--source=hf://{REPO}@{commit}/data/cpp/a.parquet")  # which is here already
    assert found["totals"]["base_data_v3"]["documents"] < 60 and len(hub.asked) == num_asked + 1


def test_a_file_that_leads_out_of_the_folder_is_not_copied(hub, tmp_path):
    hub.push(REPO, {"data/../../../../x.parquet": b"PAR1"})
    with pytest.raises(BadInput, match=r"--source=.*names a file 'data/\.\./"):
        prepare(tmp_path / "out", f"--source=hf://{REPO}/data")
    assert not list(tmp_path.rglob("x.parquet"))


# -----------------------------------------------------------------------------
# Refusals and outages


@pytest.mark.parametrize("token, url, words", [
    (None, URL, ["401", "Access is restricted", "HF_TOKEN"]),
    ("hf_wrong", URL, ["403", "also for Bearer [token]", "HF_TOKEN"]),
    ("hf_\tx", URL, ["HF_TOKEN has characters"]),
    ("hf_secret", "hf://datasets/org/none", ["404", "Repository not found", "org/none"]),
    ("hf_secret", f"hf://{REPO}@v2/corpus", ["404", "Invalid rev id", "@v2"]),
    ("hf_secret", f"hf://{REPO}/nothing", ["404", "nothing does not exist"])])
def test_a_refusal_is_one_line_that_shows_no_token(hub, folder, monkeypatch, token, url, words):
    hub.push_folder(REPO, folder)
    hub.gated = "hf_secret"
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(BadInput) as refused:
        list_shards(url)
    message = str(refused.value)
    assert (token or "hf_") not in message and not [word for word in words if word not in message], message


@pytest.mark.parametrize("headers", [{"Retry-After": "3"}, {"RateLimit": '"api";r=0;t=3'}])
def test_too_many_requests_wait_as_long_as_the_hub_says_within_a_limit(hub, folder, monkeypatch, headers):
    hub.push_folder(REPO, folder)
    waits = []
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    hub.failures = [(429, headers), (503, {}), (429, headers)]
    assert len(list_shards(URL)) == 2
    assert len(waits) == 3 and waits[0] == waits[2] == 3 and waits[1] < 1
    hub.failures = [(429, {"Retry-After": "600"})]
    elsewhere.forget()
    with pytest.raises(Outage, match=r"asks to wait for 10 minutes \(429 Too Many Requests\)"):
        list_shards(URL)
    assert len(waits) == 3


def test_a_broken_connection_continues_where_it_broke_and_one_that_stays_broken_ends_in_one_line(
        hub, folder, monkeypatch):
    hub.push_folder(REPO, folder)
    hub.cuts = [1000, 0, 30_000]
    assert texts(URL) == texts(folder / "corpus") and not hub.cuts
    hub.cuts = [0] * 1000
    monkeypatch.setattr(remote, "OUTAGE_S", 0.2)
    shutil.rmtree(cache.get_base_dir())
    cache._cache_folder.cache_clear()
    elsewhere.forget()
    with pytest.raises(Outage, match=r"hf://.* has not been reached for"):
        texts(URL)


def test_a_hub_that_is_silent_or_no_hub_ends_in_one_line(hub, folder, monkeypatch):
    hub.push_folder(REPO, folder)
    hub.stall = threading.Event()
    monkeypatch.setattr(remote, "OUTAGE_S", 0.2)
    monkeypatch.setattr(hub_files, "TRY_TIMEOUT_S", 0.2)
    with pytest.raises(Outage, match="timed out"):
        texts(URL)
    hub.stall.set()
    hub.answer = lambda *request: (b"<html>", {})
    elsewhere.forget()
    with pytest.raises(Outage, match="not the Hub's"):
        list_shards(URL)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE"):
        list_shards(URL)


# -----------------------------------------------------------------------------
# Places


def test_nothing_is_written_to_the_hub():
    with pytest.raises(BadInput, match="--checkpoint_mirror=hf.*the Hub is only read: give gs://"):
        parse_flags([f"--checkpoint_mirror=hf://{REPO}"])


def test_what_several_runs_share_names_a_commit(tmp_path):
    for place, words in ((f"hf://{REPO}/a", "source x: dir.*@COMMIT/a"), (f"hf://{REPO}@main/a", "@COMMIT/a")):
        (tmp_path / "mix.toml").write_text(f"[sources.x]\ndir = '{place}'\nweight = 1\n")
        with pytest.raises(BadInput, match=words):
            read_mixture(tmp_path / "mix.toml")
        with pytest.raises(BadInput, match="@COMMIT/a"):
            ablate.make_trial("variant", [f"--val_dir={place}", "--run=x"])
    place = f"hf://{REPO}@{'a' * 40}/a"
    (tmp_path / "mix.toml").write_text(f"[sources.x]\ndir = '{place}'\nweight = 1\n")
    assert read_mixture(tmp_path / "mix.toml").sources[0].place == place
