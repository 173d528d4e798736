"""Real clients complete from a real model: Vim with llama.vim, the openai package, Continue's adapter.

The plugin is taken from the folder LLAMA_VIM (a checkout of ggml-org/llama.vim), and the last one from NODE_CLIENTS,
where `npm install --ignore-scripts @continuedev/openai-adapters@1.37.0` was run.
"""
import os
import shutil
import subprocess
from pathlib import Path

import openai
import pytest

from tests.serve.conftest import AFTER, BEFORE, REST, SOURCE, wait_until

pytestmark = pytest.mark.slow


def folder(variable, file, advice):
    """Returns the folder that an environment variable names; skips the test if `file` is not in it."""
    path = Path(os.environ.get(variable, "/nonexistent"))
    if not (path / file).exists():
        pytest.skip(f"${variable} names no folder with {file}: {advice}")
    return path


# Vim with llama.vim


class Terminal:
    """A program in a terminal of tmux, on a socket of its own."""

    def __init__(self, socket, *command, rows=24):
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        self._run("new-session", "-d", "-x", "100", "-y", str(rows), *command)

    def _run(self, *arguments):
        return subprocess.run([*self._tmux, *arguments], check=True, capture_output=True, text=True, timeout=30).stdout

    def keys(self, *keys):
        self._run("send-keys", *keys)

    def type(self, text):
        self._run("send-keys", "-l", text)

    def screen(self):
        return self._run("capture-pane", "-p")

    def close(self):
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, timeout=30)  # it may have ended


@pytest.fixture
def vim(client, tmp_path):
    """Vim with SOURCE, whose first function has no body."""
    for program in ("vim", "tmux", "curl"):
        if not shutil.which(program):
            pytest.skip(f"there is no {program}")
    plugin = folder("LLAMA_VIM", "autoload/llama.vim", "git clone https://github.com/ggml-org/llama.vim")
    file, vimrc = tmp_path / "add.cpp", tmp_path / "vimrc"
    file.write_text(BEFORE + AFTER.removeprefix("\n"))
    vimrc.write_text(f"""\
set nocompatible noswapfile viminfo= encoding=utf-8
let g:llama_config = {{'endpoint_fim': '{client.base_url}/infill', 'show_info': 2}}
set runtimepath+={plugin}
""")
    terminal = Terminal(tmp_path / "tmux", "vim", "-u", str(vimrc), str(file))
    yield terminal, file
    terminal.close()


def test_vim_shows_ghost_text_and_tab_accepts_it(vim):
    terminal, file = vim
    wait_until(lambda: "ENTER" in terminal.screen() or "int twice" in terminal.screen(), terminal.screen)
    if "ENTER" in terminal.screen():  # llama.vim warns of Vim 9.0, with which it works
        terminal.keys("Enter")
    wait_until(lambda: "int twice" in terminal.screen(), terminal.screen)
    terminal.keys("o")
    terminal.type("    ret")
    wait_until(lambda: "return a + b;" in terminal.screen(), terminal.screen)
    wait_until(lambda: "t/s)" in terminal.screen(), terminal.screen)  # llama.vim shows the server's timings
    terminal.keys("Tab")
    terminal.keys("Escape")
    terminal.type(":wq")
    terminal.keys("Enter")
    wait_until(lambda: file.read_text() == SOURCE, lambda: file.read_text() + terminal.screen())


# openai


@pytest.fixture
def openai_client(client):
    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none")


REQUEST = {"model": "tiny", "prompt": BEFORE + "    ret", "suffix": AFTER, "max_tokens": 40, "temperature": 0}


def test_openai_completes_streams_and_lists_the_model(openai_client):
    assert openai_client.models.list().data[0].id == "tiny"
    completion = openai_client.completions.create(**REQUEST)
    assert completion.choices[0].text == REST and completion.choices[0].finish_reason == "stop"
    assert completion.usage.completion_tokens > 0
    chunks = list(openai_client.completions.create(**REQUEST, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == REST and len(chunks) > 2
    with pytest.raises(openai.UnprocessableEntityError, match="temperature"):
        openai_client.completions.create(**REQUEST | {"temperature": 9})


# Continue


def node_client(file):
    """Returns the path of a file of npm's packages; skips the test without it."""
    if not shutil.which("node"):
        pytest.skip("there is no node")
    return folder("NODE_CLIENTS", f"node_modules/{file}", "run npm install in it, as the top of this file says"
                  ) / "node_modules" / file


def test_continues_openai_provider_streams_its_own_prompt_of_a_gap(client):
    adapters = node_client("@continuedev/openai-adapters/dist/index.js")
    program = """
const [adapters, apiBase, prompt] = process.argv.slice(1);
const {constructLlmApi} = await import(adapters);
const api = constructLlmApi({provider: "openai", apiKey: "none", apiBase});
const body = {model: "nanochat", prompt, max_tokens: 2048, temperature: 0.01, stream: true, stop: ["<fim_prefix>",
              "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>", "</fim_middle>", "</code>", "/src/"]};
let text = "";
for await (const chunk of api.completionStream(body, new AbortController().signal)) text += chunk.choices[0].text;
console.log(text);
"""
    prompt = f"<fim_prefix>\n// add.cpp\n{BEFORE}    ret<fim_suffix>{AFTER}<fim_middle>"
    done = subprocess.run(["node", "--input-type=module", "-e", program, str(adapters), f"{client.base_url}/v1/",
                           prompt], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{REST}\n", done.stderr
