"""Records docs/vim.svg, a real Vim in which llama.vim completes C++, and docs/page.png, the page at /, from a server.

    pip install asciinema==2.4.0 termtosvg==1.1.0
    python3 -m scripts.serve --checkpoint=NAME --quantize=int8
    LLAMA_VIM=~/llama.vim python3 -m dev.record http://127.0.0.1:8012

LLAMA_VIM is a checkout of ggml-org/llama.vim. Vim, tmux and Chromium are needed. Pauses are as they were: what is shown
is the true speed of that model on that machine.
"""
import base64
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.serve.test_server_clients import Terminal
from tests.serve.test_server_page import GHOST, Browser, edit

DOCS = Path(__file__).parent.parent / "docs"
FILE = """\
#include <string>
#include <vector>

namespace text {

class Buffer {
 public:
  size_t size() const {
  }

 private:
  std::vector<std::string> lines_;
};

}  // namespace text
"""
# Each is typed behind the line that begins the pair. Then comes Tab, if a completion is shown within SHOWN_S.
TYPED = (("  size_t size() const {", "    return "), ("  }", "  bool empty() const { re"))
SHOWN_S, KEY_S = 6, 0.12


def record_vim(url, plugin, folder):
    """Writes docs/vim.svg."""
    file, vimrc, cast = folder / "buffer.h", folder / "vimrc", folder / "vim.cast"
    file.write_text(FILE)
    vimrc.write_text(f"""\
set nocompatible noswapfile viminfo= encoding=utf-8 filetype=cpp noautoindent laststatus=0 t_AL= t_al= t_DL= t_dl= t_cs=
syntax on
let g:llama_config = {{'endpoint_fim': '{url}/infill', 'ring_n_chunks': 0, 't_max_predict_ms': 3000, 'show_info': 0}}
set runtimepath+={plugin}
""")
    terminal = Terminal(folder / "tmux", "asciinema", "rec", "--quiet", "--overwrite", "--command",
                        f"cd {folder} && vim -u {vimrc} {file.name}", str(cast))
    wait_for(lambda: "ENTER" in terminal.screen() or "class Buffer" in terminal.screen(), 20)
    if "ENTER" in terminal.screen():  # llama.vim warns of Vim 9.0, with which it works
        terminal.keys("Enter")
    for line, typed in TYPED:
        terminal.type(f"/^{line.replace('*', '.')}$")
        terminal.keys("Enter")
        terminal.keys("o", "C-u")
        for character in typed:
            terminal.type(character)
            time.sleep(KEY_S)
        if wait_for(lambda typed=typed: shows_more_than(typed, terminal.screen()), SHOWN_S):
            time.sleep(1.5)
            terminal.keys("Tab")
        time.sleep(1)
        terminal.keys("Escape")
    time.sleep(2)
    terminal.type(":q!")
    terminal.keys("Enter")
    wait_for(lambda: cast.exists() and not is_open(terminal), 20)
    subprocess.run(["termtosvg", "render", str(cast), str(DOCS / "vim.svg"), "-D", "4000", "-M", "8000"], check=True)


def record_page(url, folder):
    """Writes docs/page.png."""
    browser = Browser(folder / "profile")
    try:
        browser.call("Page.navigate", url=url)
        browser.wait_for("document.readyState === 'complete' && typeof text !== 'undefined'")
        line, typed = TYPED[0]
        before, after = FILE.split(f"{line}\n")
        edit(browser, f"{before}{line}\n", f"\n{after}")
        browser.type(typed)
        browser.wait_for(f"{GHOST} !== ''")
        browser.wait_for("/tokens in/.test(document.getElementById('status').textContent)")
        (DOCS / "page.png").write_bytes(base64.b64decode(browser.call("Page.captureScreenshot")["data"]))
    finally:
        browser.close()


def wait_for(condition, seconds):
    """Returns whether condition() holds within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def shows_more_than(typed, screen):
    return any(line.startswith(typed) and line.rstrip() != typed.rstrip() for line in screen.splitlines())


def is_open(terminal):
    try:
        return bool(terminal.screen())
    except subprocess.CalledProcessError:
        return False


def main():
    if len(sys.argv) != 2 or not os.environ.get("LLAMA_VIM"):
        sys.exit(__doc__)
    url = sys.argv[1].rstrip("/")
    with tempfile.TemporaryDirectory() as folder:
        record_vim(url, os.environ["LLAMA_VIM"], Path(folder))
        record_page(url, Path(folder))


if __name__ == "__main__":
    main()
