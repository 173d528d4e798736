"""A public model becomes a checkpoint and an export again: real models of transformers, whose weights, logits and files
must come back, and files that lie, which must end in one line."""
import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
import zipfile
from functools import cache
from unittest import mock

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.meta import load_meta
from nanochat.common import BadInput, Outage, get_base_dir
from nanochat.data.storage import copy_files
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.export import hub
from nanochat.export.export import write_for_transformers
from nanochat.export.llama import read_config
from nanochat.infer.load import load_model
from nanochat.kernels.choose import get_kernels
from nanochat.model.llama import LlamaConfig
from nanochat.model.llama_layer import Llama
from scripts import export, import_hf
from tests.checkpoint.states import make_meta, names
from tests.data.hub import files_of, smollm2, zipped
from tests.hub import Hub

transformers = pytest.importorskip("transformers")

CARD = "---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n"
SIZES = {"vocab_size": 960, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
         "bos_token_id": 0, "eos_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
MODELS = {  # the vocabulary has 901 ids: rows without an id are normal
    "llama tied": ("Llama", {"tie_word_embeddings": True}, "bfloat16"),
    "llama, own head": ("Llama", {"head_dim": 24}, "float32"),
    "llama, half": ("Llama", {"num_key_value_heads": 4}, "float16"),
    "qwen2": ("Qwen2", {"rms_norm_eps": 1e-6}, "bfloat16"),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}, "float32"),
    "qwen3": ("Qwen3", {"head_dim": 16}, "bfloat16"),
    "qwen3 tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}, "float32")}


@cache
def tokenizer_files():
    """Returns the files of a tokenizer of 901 ids, whose last is no special token."""
    tokenizer, config = smollm2()
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])
    return files_of(tokenizer, config)


def write_tokenizer(folder):
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)


def write_model(folder, kind="llama tied", shard="1GB"):
    """Writes a model with random weights."""
    family, options, dtype = MODELS[kind]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}\r\n")
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE").write_text("Apache License\n")


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "model"
    write_model(folder)
    return folder


@pytest.fixture
def folder(small_llama, tmp_path):
    """A folder with a small Llama, as a copy for each test."""
    return shutil.copytree(small_llama, tmp_path / "model")


def tensors_in(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def import_to(run, place, *flags):
    import_hf.main([str(place), f"--run={run}", *flags])
    return on_disk.latest(get_base_dir() / "checkpoints" / run)


def change_json(name, **values):
    def change(folder):
        found = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps({key: value for key, value in found.items() if value != "gone"}))
    return change


def change(path, meta=None, **weights):
    """Changes a checkpoint as training would."""
    save_file(load_file(path / on_disk.MODEL) | weights, path / on_disk.MODEL)
    change_json(on_disk.META, **(meta or {}))(path)
    (path / on_disk.SUMS).write_text(
        on_disk.sums_text([path / name for name in (on_disk.MODEL, on_disk.META, on_disk.SOURCE)]))


@pytest.mark.parametrize("kind, shard", [
    ("qwen2", "20KB"), *(pytest.param(kind, "1GB", marks=pytest.mark.slow) for kind in MODELS)])
def test_import_and_export_give_back_every_bit_and_transformers_logits(tmp_path, base_dir, kind, shard):
    write_model(tmp_path / "model", kind, shard)
    if shard == "20KB":
        assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    path = import_to("imported", tmp_path / "model")
    assert on_disk.find_problem(path, weights_only=True) is None
    out = tmp_path / "exported"
    export.main(["--checkpoint=imported", f"--out={out}"])
    expected, found = tensors_in(tmp_path / "model"), tensors_in(out)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    same = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
            "LICENSE", "README.md"}
    assert same <= set(names(out))
    for name in same:
        assert (out / name).read_bytes() == (tmp_path / "model" / name).read_bytes(), name

    ours, tokenizer, meta = load_model(path, Dist("cpu", torch.device("cpu")))
    assert tokenizer.n_vocab == 901 and meta.source["licence"] == "apache-2.0"
    ids = torch.randint(257, (2, 50), generator=torch.Generator().manual_seed(2))
    for folder in (tmp_path / "model", out):
        theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                                            output_loading_info=True)
        assert type(theirs).__name__.startswith(MODELS[kind][0]) and not any(loading.values())
        with torch.no_grad():
            assert (ours(ids) - theirs(ids).logits).abs().max() < 1e-5


def test_weights_that_were_trained_go_out_in_the_dtype_they_came_in_with_the_licence(folder, base_dir, tmp_path):
    path = import_to("imported", folder)
    mlp_in = load_file(path / on_disk.MODEL)["mlp_in"] + 1e-3  # in fp32, as a master
    change(path, {"step": 7, "flags": {"run": "imported"}}, mlp_in=mlp_in)
    export.main(["--checkpoint=imported", f"--out={tmp_path}/out"])
    found = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(found["model.layers.2.mlp.up_proj.weight"], mlp_in[2].bfloat16())
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith(CARD) and "7 steps" in card and "apache-2.0" in card[len(CARD):]
    assert (tmp_path / "out/config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_began_here_from_nothing_is_a_llama_of_transformers(tmp_path, byte_tokenizer_dir, tied):
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    config = LlamaConfig(vocab_size=tokenizer.n_vocab, n_layer=2, max_seq_len=32, n_embd=48, n_head=3, n_kv_head=1,
                         head_dim=8, mlp_dim=40, tied_head=tied, rope_theta=700.0)
    ours = Llama(config, get_kernels("current", "cpu")).init_weights(1)
    write_for_transformers(tmp_path, None, ours, tokenizer, make_meta(), card="")
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(theirs).__name__ == "LlamaForCausalLM" and not any(loading.values())
    ids = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert (ours(ids) - theirs(ids).logits).abs().max() < 1e-5
    found = json.loads((tmp_path / "config.json").read_text())  # transformers 4 reads the second of each
    assert found["rope_parameters"]["rope_theta"] == found["rope_theta"] == 700.0
    assert found["dtype"] == found["torch_dtype"] == "float32"


def test_an_import_holds_one_tensor_of_the_source_at_a_time(folder, base_dir):
    alive = []
    read = hub.Stored.read

    def watched(self, name):
        assert sum(each() is not None for each in alive) <= 1
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    with mock.patch.object(hub.Stored, "read", watched):
        import_to("imported", folder)
    assert len(alive) == len(tensors_in(folder))


def change_tensors(change):
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return apply


def in_config(**values):
    return change_json("config.json", **values)


def divided(change):
    """Divides the tensors into two files, which change(first, second) changes."""
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        parts = [{name: tensors[name] for name in part} for part in (sorted(tensors)[:5], sorted(tensors)[5:])]
        change(*parts)
        for number, part in enumerate(parts):
            if part:
                save_file(part, folder / f"model-{number}.safetensors")
    return apply


def have_only_a_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def claim_a_header_of_10_gb(folder):
    with open(folder / "model.safetensors", "r+b") as file:
        file.write((10 * 10**9).to_bytes(8, "little"))


def link_to(name):
    def change(folder):
        (folder / name).rename(folder.parent / "elsewhere")
        (folder / name).symlink_to("../elsewhere")
    return change


def be_a_pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def end_early(folder):
    os.truncate(folder / "model.safetensors", 20_000)


def have_more_ids_than_rows(folder):
    in_config(vocab_size=900)(folder)
    change_tensors(lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING][:900]}))(folder)


def be_of_another_family(folder):
    in_config(model_type="mixtral")(folder)
    (folder / "model.safetensors").unlink()  # which must not be missed before this is said


EMBEDDING, Q = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"
LIES = {
    "another architecture": (be_of_another_family, ["model_type", "mixtral", "qwen2"]),
    "another head": (in_config(architectures=["LlamaForSequenceClassification"]), ["LlamaForSequenceClassification"]),
    "scaled positions": (in_config(rope_parameters={"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}),
                         ["rope_parameters", "llama3"]),
    "scaled positions of old": (in_config(rope_scaling={"type": "linear", "factor": 2.0}), ["rope_scaling", "linear"]),
    "positions of some channels": (in_config(partial_rotary_factor=0.5), ["partial_rotary_factor", "0.5"]),
    "no base of positions": (in_config(rope_parameters="gone", rope_theta="gone"), ["rope_theta", "10000"]),
    "quantized": (in_config(quantization_config={"quant_method": "gptq"}), ["quantization_config", "gptq"]),
    "biases": (in_config(attention_bias=True), ["attention_bias", "true"]),
    "biases of the MLP": (in_config(mlp_bias=True), ["mlp_bias"]),
    "another activation": (in_config(hidden_act="gelu"), ["hidden_act", "gelu"]),
    "windows": (in_config(use_sliding_window=True, sliding_window=16, max_window_layers=1), ["use_sliding_window"]),
    "windows of some layers": (in_config(layer_types=["full_attention", "sliding_attention"]), ["layer_types"]),
    "a size that is none": (in_config(hidden_size="32"), ["hidden_size", '"32"']),
    "a negative size": (in_config(num_hidden_layers=-3), ["num_hidden_layers", "-3"]),
    "no JSON": (lambda folder: (folder / "config.json").write_text("[" * 10**5), ["config.json", "copy it again"]),
    "no object": (lambda folder: (folder / "config.json").write_text("[1]"), ["config.json", "copy it again"]),
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json", "no"]),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer"]),
    "a broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), ["model: its tokenizer files"]),
    "more ids than rows": (have_more_ids_than_rows, ["900", "vocab_size"]),
    "another width": (in_config(hidden_size=64, head_dim=8), ["shape", "(960, 32)", "(960, 64)"]),
    "own head and missing": (in_config(tie_word_embeddings=False), ["lm_head.weight", "missing"]),
    "tied head that differs": (
        change_tensors(lambda tensors: tensors.update({"lm_head.weight": 1 + tensors[EMBEDDING]})),
        ["lm_head", "differs"]),
    "biases nobody asked for": (change_tensors(
        lambda tensors: tensors.update({Q.replace("weight", "bias"): torch.zeros(32, dtype=torch.bfloat16)})),
        ["q_proj.bias", "unknown"]),
    "NaN": (change_tensors(lambda tensors: tensors[Q].fill_(float("nan"))), [Q, "finite"]),
    "infinite": (change_tensors(lambda tensors: tensors["model.norm.weight"][:1].fill_(float("-inf"))), ["finite"]),
    "two dtypes": (change_tensors(lambda tensors: tensors.update({Q: tensors[Q].float()})), ["BF16", "F32"]),
    "bytes for weights": (change_tensors(
        lambda tensors: tensors.update({name: tensor.to(torch.int8) for name, tensor in tensors.items()})), ["I8"]),
    "header of 10 GB": (claim_a_header_of_10_gb, ["model.safetensors", "copy it again"]),
    "half a file": (end_early, ["model.safetensors", "copy it again"]),
    "a pipe": (be_a_pipe, ["model.safetensors", "ordinary"]),
    "only a pickle": (have_only_a_pickle, ["pytorch_model.bin", "pickle"]),
    "weights elsewhere": (link_to("model.safetensors"), ["model.safetensors", "link"]),
    "a tokenizer elsewhere": (link_to("tokenizer.json"), ["tokenizer.json", "link"]),
    "a missing shard": (divided(lambda first, second: second.clear()), ["model.layers.1", "missing"]),
    "a tensor twice": (divided(lambda first, second: first.update([next(iter(second.items()))])),
                       ["model-0.safetensors", "model-1.safetensors"]),
}


EMPTY_ZIP = b"PK\x05\x06" + bytes(18)


@pytest.mark.parametrize("content", [None, b"", EMPTY_ZIP, zipped({"config.json": b"[]"})],
                         ids=["missing", "no bytes", "empty", "list"])  # a zip has the time, and a name must not
def test_a_checkpoint_whose_small_files_are_damaged_is_exported_nowhere(folder, base_dir, tmp_path, content):
    """Though its checksums agree."""
    path = import_to("imported", folder)
    (path / on_disk.SOURCE).unlink()
    files = [path / on_disk.MODEL, path / on_disk.META]
    if content is not None:
        (path / on_disk.SOURCE).write_bytes(content)
        files.append(path / on_disk.SOURCE)
    (path / on_disk.SUMS).write_text(on_disk.sums_text(files))
    with pytest.raises(BadInput, match="source.zip") as error:
        export.main(["--checkpoint=imported", f"--out={tmp_path}/out", f"--tokenizer_dir={folder}"])
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("stated, licence", [
    ("license: mit", "mit"), ("license: 'apache-2.0' ", "apache-2.0"), ("license:\n- mit\n- bsl-1.0", "mit"),
    ("license: other\nlicense_name: own", "own"), ("tags: x", "")])
def test_the_licence_is_what_the_card_states(stated, licence):
    for begin, end in (("", "\n"), ("\ufeff", "\r\n")):
        card = f"{begin}---\n{stated}\n---\n".replace("\n", end)
        assert hub.licence_of(card.encode()) == licence


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie_are_refused_in_one_line_and_leave_nothing(folder, base_dir, lie):
    change, words = LIES[lie]
    change(folder)
    with pytest.raises(BadInput) as error:
        import_to("imported", folder)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value
    left = names(get_base_dir() / "checkpoints" / "imported")
    assert all(name.startswith(".") for name in left), left  # the lock


def test_what_makes_no_difference_is_taken(folder, base_dir):
    """A tied head that is there although tied, windows that are switched off, and the names of transformers 4."""
    change_tensors(lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING]}))(folder)
    in_config(use_sliding_window=False, sliding_window=16, max_window_layers=1, rope_parameters="gone",
              rope_theta=5000, rope_scaling=None)(folder)
    meta = load_meta(import_to("imported", folder, "--max_seq_len=40"))
    assert meta.config["rope_theta"] == 5000.0 and meta.config["max_seq_len"] == 40
    assert meta.config["max_positions"] == 64 and meta.source["commit"] == ""
    found = json.loads((folder / "config.json").read_text())
    for rope in ({"rope_theta": 5000.0}, {"type": "default", "rope_theta": 5000}, {"rope_type": "default"}):
        assert read_config(found | {"rope_parameters": rope}).rope_theta == 5000.0


def test_the_same_files_make_the_same_checkpoint_and_a_run_is_never_replaced(folder, base_dir):
    first, second = import_to("first", folder), import_to("second", folder)
    for name in (on_disk.MODEL, on_disk.SOURCE):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    with zipfile.ZipFile(first / on_disk.SOURCE) as file:
        assert file.read("chat_template.jinja") == b"{{ messages }}\r\n"
    assert load_tokenizer(checkpoint=first).sha256 == load_meta(first).tokenizer_sha256
    with pytest.raises(BadInput, match="--run=first has checkpoints"):
        import_to("first", folder)
    with pytest.raises(BadInput, match="--run"):
        import_hf.main([str(folder)])
    with pytest.raises(BadInput, match="no folder"):
        import_to("third", folder / "nowhere")


KILLED = """
import os, signal, sys
from nanochat.export import hub
from scripts.import_hf import main
reads, read = [], hub.Stored.read
def dying(self, name):
    reads.append(name)
    if len(reads) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, name)
hub.Stored.read = dying
main(sys.argv[1:])
"""


def test_a_killed_import_leaves_nothing_that_looks_whole_and_the_next_one_succeeds(folder, base_dir):
    process = subprocess.run([sys.executable, "-c", KILLED, folder, "--run=imported"], timeout=100)
    assert process.returncode == -signal.SIGKILL
    assert on_disk.latest(get_base_dir() / "checkpoints" / "imported") is None
    path = import_to("imported", folder)
    assert names(path.parent)[-1] == "step_000000" and on_disk.find_problem(path, weights_only=True) is None
    assert "step_000000.tmp" not in names(path.parent)


def test_a_model_in_a_bucket_is_imported(folder, base_dir, bucket):
    copy_files([(str(path), f"gs://b/models/small/{path.name}") for path in folder.iterdir()])
    path = import_to("imported", "gs://b/models/small")
    assert load_meta(path).source["model"] == "small" and ".download" not in names(path.parent)
    assert load_file(path / on_disk.MODEL)["out_norm"].shape == (32,)


IMPORT_BOTH = """
import sys
from nanochat.common import BadInput
from scripts.import_hf import main
try:
    main(["org/none", "--run=imported"])
except BadInput as error:
    print(error)
main(["org/small", "--run=imported"])
"""


def test_the_hubs_client_fetches_a_model_at_a_commit_which_the_checkpoint_remembers(folder, base_dir):
    server = Hub()
    commit = server.push_folder("models/org/small", folder)
    done = subprocess.run([sys.executable, "-c", IMPORT_BOTH], env=os.environ | server.env, capture_output=True,
                          text=True, timeout=100)
    server.close()
    assert done.returncode == 0, done.stderr
    refusal = done.stdout.splitlines()[0]
    assert "org/none" in refusal and "HF_TOKEN" in refusal and "Bearer hf_secret" in server.tokens
    path = on_disk.latest(get_base_dir() / "checkpoints" / "imported")
    source = load_meta(path).source
    assert source["model"] == "org/small" and source["commit"] == commit and source["licence"] == "apache-2.0"
    assert len(load_file(path / on_disk.MODEL)) == 11 and ".download" not in names(path.parent)
    with pytest.raises(Outage, match="org/small"):
        hub._ask_hub(HfApi(server.env["HF_ENDPOINT"]).model_info, "org/small")
