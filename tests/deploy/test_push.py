"""What push.sh sends: the code, and never a secret that lies beside, above or inside the checkout."""
import os
import subprocess

import pytest

from tests.deploy.conftest import ROOT

SECRET = "TOP-SECRET"
INSIDE = [".env", ".tpu_env", "key.pem", "service-account.json", ".wandb_key", "id_rsa", "nanochat/.env",
          "nanochat/id_rsa", "nanochat/id_ed25519.pub", "nanochat/server.pem", "nanochat/KEY.PEM",
          "nanochat/train/api.key", "nanochat/.ssh/config.py", "nanochat/prod.env", "nanochat/with space.key",
          "nanochat/line\nbreak.py", "nanochat/train/.netrc", "scripts/gcp-credentials.json", "scripts/notes.txt",
          "tokenizer/secret.yaml", "tokenizer/project-1234.json", "nanochat/api_key.json", "nanochat/wandb_key.txt",
          "nanochat/hf_token", "nanochat/my_secrets.py", "nanochat/keys.json", "nanochat/__pycache__/x.pyc",
          "nanochat/big.parquet", "scripts/nohup.out", "scripts/run.log", "data/shard_00000.parquet"]


def git(root, command):
    subprocess.run(f"git -c user.name=a -c user.email=a@b {command}", shell=True, cwd=root, check=True)


def plant(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(SECRET)


def pushed(vm):
    """Returns the content of each file that was pushed, by its path."""
    code = (vm.home / "nanochat").resolve()
    return {str(path.relative_to(code)): path.read_text(errors="replace") for path in code.rglob("*")
            if path.is_file() and not path.is_symlink()}


@pytest.fixture
def folder(tmp_path):
    """A folder of secrets, which has a checkout with uncommitted work, and a link to the checkout's deploy/."""
    root = tmp_path / "work/checkout"
    root.mkdir(parents=True)
    for name in ("deploy", "nanochat", "scripts", "tokenizer", "pyproject.toml", ".tpu_env.example"):
        subprocess.run(["cp", "-r", ROOT / name, root / name], check=True)
    git(root, "init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm a")
    plant(tmp_path, [".wandb_key", ".ssh/id_rsa", ".env", "mail.txt", "work/.env", "work/taxes.py"])
    plant(root, INSIDE)
    for name in ("new.py", "new one.py", "tokens.py", "keyboard.py"):
        (root / "nanochat" / name).write_text("new = True")
    (root / "nanochat/link.py").symlink_to(tmp_path / ".wandb_key")
    (tmp_path / "work/deploy").symlink_to(root / "deploy")
    return tmp_path


@pytest.mark.parametrize("versioned", [True, False])
def test_no_secret_beside_above_or_inside_the_checkout_is_pushed(laptop, folder, versioned):
    root, vm = folder / "work/checkout", laptop.vm(set_up=False)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=root, text=True).strip()
    if not versioned:
        subprocess.run(["rm", "-r", root / ".git"], check=True)
    output = laptop.run("push.sh", vm.ip, root=folder / "work")  # through the link
    files = pushed(vm)
    assert not [name for name, text in files.items() if SECRET in text]
    assert {"nanochat/common.py", "nanochat/new.py", "nanochat/new one.py", "scripts/base_train.py", "pyproject.toml",
            "nanochat/tokens.py", "nanochat/keyboard.py", "nanochat/device/prices.csv", "nanochat/serve/page.html",
            "nanochat/judge/problem_set/split.cpp", "tokenizer/vocabulary.tiktoken", "tokenizer/tokenizer.json",
            ".tpu_env.example"} <= set(files)
    for name in ("nanochat/server.pem", "scripts/gcp-credentials.json", "nanochat/link.py", "nanochat/line?break.py"):
        assert name in output.partition("left out")[2]
    assert "__pycache__" not in output and "kB packed" in output
    assert files["COMMIT"].startswith(commit if versioned else "unversioned-")


def test_what_git_tracks_is_pushed_unless_it_is_a_secret_or_a_link(laptop, folder):
    root, vm = folder / "work/checkout", laptop.vm(set_up=False)
    (root / "nanochat/kernels/table.bin").write_text("data")
    (root / "nanochat/scratch.py").write_text(SECRET)
    (root / ".gitignore").write_text("scratch.py")
    git(root, "add -f .gitignore nanochat/.env nanochat/*.pem nanochat/KEY.PEM nanochat/kernels/table.bin")
    git(root, "init -q nanochat/lib && cd nanochat/lib && touch b && git add b && "
              "git -c user.name=a -c user.email=a@b commit -qm b && cd ../.. && git add nanochat/lib 2>/dev/null")
    elsewhere = folder / "elsewhere"
    subprocess.run(["mv", root / "nanochat/data", elsewhere], check=True)  # a tracked folder becomes a link
    (root / "nanochat/data").symlink_to(elsewhere)
    plant(elsewhere, ["tokenizer.py"])
    (root / "scripts/demo.py").unlink()  # and so does a tracked file
    (root / "scripts/demo.py").symlink_to(folder / "mail.txt")
    output = laptop.run("push.sh", vm.ip, root=root)
    files = pushed(vm)
    assert not [name for name, text in files.items() if SECRET in text]
    assert files["nanochat/kernels/table.bin"] == "data"
    assert "scripts/demo.py" in output and "-dirty-" in files["COMMIT"] and "submodules): nanochat/lib" in output


def test_the_environment_and_an_outer_repository_do_not_choose_what_is_pushed(laptop, folder):
    root, vm = folder / "work/checkout", laptop.vm(set_up=False)
    plant(folder / "other", ["nanochat/secret.txt"])
    git(folder / "other", "init -q && git add -A")
    laptop.run("push.sh", vm.ip, root=root, env={"GIT_DIR": str(folder / "other/.git")})
    assert "tokenizer/heldout.txt" in pushed(vm), "the checkout's repository tracks it, the other one does not"
    assert SECRET not in str(pushed(vm).values())

    subprocess.run(["rm", "-r", root / ".git"], check=True)
    git(folder, "init -q && git add .env work/.env")  # the home directory, under git
    laptop.run("push.sh", vm.ip, root=root)
    assert "nanochat/common.py" in pushed(vm) and SECRET not in str(pushed(vm).values())


@pytest.mark.parametrize("nanochat", ["missing", "empty", "a link"])
def test_a_folder_without_the_code_is_refused_before_anything_is_sent(laptop, tmp_path, nanochat):
    plant(tmp_path, [".env", "mail.txt", "scripts/mail.py", "else/where.py"])
    subprocess.run(["cp", "-r", ROOT / "deploy", tmp_path], check=True)
    if nanochat == "empty":
        (tmp_path / "nanochat").mkdir()
    elif nanochat == "a link":
        os.symlink(tmp_path / "else", tmp_path / "nanochat")
    output = laptop.run("push.sh", "127.0.0.1", root=tmp_path, status=2)
    assert output.startswith("error: no code to push: ") and len(output.splitlines()) == 1


@pytest.fixture
def checkout(tmp_path):
    """A small checkout that a test may change."""
    subprocess.run(["cp", "-r", ROOT / "deploy", tmp_path], check=True)
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat/common.py").write_text("changed = False\n")
    return tmp_path


def test_push_again_replaces_the_code_over_a_lost_connection_and_keeps_other_files(laptop, checkout):
    vm = laptop.vm()
    (vm.home / "nanochat").mkdir()
    (vm.home / "nanochat/mine.txt").write_text("a clone made by hand")
    laptop.run("push.sh", vm.ip, root=checkout)
    assert (vm.home / "nanochat.before_push/mine.txt").exists()
    (checkout / "nanochat/common.py").write_text("changed = True\n")
    (vm.home / "drop_connection").touch()
    output = laptop.run("push.sh", vm.ip, root=checkout)
    assert "no connection (attempt 1 of 4)" in output and "~/nanochat is now" in output
    assert (vm.home / "nanochat/nanochat/common.py").read_text() == "changed = True\n"
    assert "packages are as pinned" in laptop.run("setup.sh", vm.ip)
    assert (vm.home / "nanochat/.tpu_env").read_text() == (ROOT / ".tpu_env.example").read_text()


def test_push_onto_a_full_disk_leaves_the_old_code_whole(laptop, checkout):
    vm = laptop.vm(disk_mb=4, set_up=False)
    laptop.run("push.sh", vm.ip, root=checkout)
    (checkout / "tokenizer").mkdir()
    (checkout / "tokenizer/tokenizer.pkl").write_bytes(os.urandom(5_000_000))
    (checkout / "nanochat/common.py").write_text("changed = True\n")
    assert "is the disk full?" in laptop.run("push.sh", vm.ip, root=checkout, status=1)
    seen = vm.shell("ls ~/nanochat.d/releases; cat ~/nanochat/nanochat/common.py")
    assert "part" not in seen and seen.endswith("\nchanged = False\n")


def test_push_refuses_more_than_50_mb_and_names_the_largest(laptop, checkout):
    script = checkout / "deploy/push.sh"
    script.write_text(script.read_text().replace("MAX_BYTES=50000000\n", "MAX_BYTES=50\n"))
    assert "nanochat/common.py" in laptop.run("push.sh", "127.0.0.1", root=checkout, status=2)


def test_a_host_of_the_ssh_configuration_and_a_changed_host_key_of_a_bare_ip(laptop, checkout):
    vm = laptop.vm()
    with open(laptop.home / ".ssh/config", "a") as config:
        config.write(f"Host box\n  HostName {vm.ip}\n  User root\n")
    assert "~/nanochat is now" in laptop.run("push.sh", "box", root=checkout)
    assert "no run yet" in laptop.run("status.sh", "box")
    (laptop.home / ".ssh/known_hosts").write_text(f"{vm.ip} {laptop.public_key}")
    for socket in (laptop.home / ".ssh").glob("nc-*"):
        socket.unlink()
    assert f"ssh-keygen -R {vm.ip}" in laptop.run("push.sh", vm.ip, root=checkout, status=1)
