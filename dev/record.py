"""Records Vim with llama.vim in docs/vim.svg and docs/context.svg, and the page at / in docs/page.png, from a server.

    pip install asciinema==2.4.0 termtosvg==1.1.0
    python3 -m scripts.serve --checkpoint=NAME
    LLAMA_VIM=~/llama.vim python3 -m dev.record http://127.0.0.1:8012 [vim] [context] [page]

LLAMA_VIM is a checkout of ggml-org/llama.vim. Vim, tmux and Chromium are needed. Pauses are as they were, but for
frames of under 80 ms, which are joined: what is shown is the true speed of that model on that machine.
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
  std::vector<std::string> lines_;

 public:
  size_t size() const {
  }
};

}  // namespace text
"""
# Each is typed behind the line that begins the pair. Then comes Tab, if a completion is shown within SHOWN_S.
TYPED = (("  size_t size() const {", "    return "), ("  }", "  bool empty() const { re"),
         ("  bool empty.*", "  void append(const std::string& line) { "))
SHOWN_S, KEY_S = 6, 0.12
# main.cpp calls what progress.h declares. Vim opens it once alone, and once behind progress.h.
HEADER = """\
#pragma once

// Tells the user how far the work is.
void report_progress_of_work(int done, int total, const char* what);
"""
MAIN = """\
#include "progress.h"

int main() {
    int total = 3;
}
"""
CALL = ("    int total = 3;", "    report_prog")
VIMRC = """\
set nocompatible noswapfile viminfo= encoding=utf-8 filetype=cpp noautoindent t_AL= t_al= t_DL= t_dl= t_cs=
syntax on
let g:llama_config = {{'endpoint_fim': '{url}/infill', 't_max_predict_ms': 3000, 'show_info': 0}}
set runtimepath+={plugin}
"""


def record_vim(url, plugin, folder):
    """Writes docs/vim.svg."""
    (folder / "buffer.h").write_text(FILE)
    (folder / "vimrc").write_text(VIMRC.format(url=url, plugin=plugin) + "set laststatus=0\n"
                                  "let g:llama_config['ring_n_chunks'] = 0\n"
                                  "let g:llama_config['stop_strings'] = [\"\\n\"]\n")  # one line at a time
    terminal = start(folder, "vim.cast", 24, "vim -u vimrc buffer.h")
    wait_for_text(terminal, "class Buffer")
    for line, typed in TYPED:
        complete(terminal, line, typed)
    finish(terminal, folder, "vim.svg")


def record_context(url, plugin, folder):
    """Writes docs/context.svg: main.cpp opened alone, then behind progress.h, with the same keys."""
    (folder / "progress.h").write_text(HEADER)
    (folder / "main.cpp").write_text(MAIN)
    (folder / "vimrc").write_text(VIMRC.format(url=url, plugin=plugin) + "set hidden laststatus=2 statusline=%f\\ "
                                  "(%{bufloaded('progress.h')?'progress.h\\ is':'no\\ other\\ file\\ is'}\\ open)\n")
    terminal = start(folder, "context.cast", 10, "vim -u vimrc main.cpp; vim -u vimrc progress.h main.cpp")
    wait_for_text(terminal, "main.cpp (no other")
    complete(terminal, *CALL)
    leave(terminal)
    wait_for_text(terminal, "progress.h (progress.h is")
    time.sleep(3)
    terminal.type(":n")
    terminal.keys("Enter")
    wait_for_text(terminal, "main.cpp (progress.h is")
    time.sleep(3)  # llama.vim takes a chunk of another file once a second
    complete(terminal, *CALL)
    finish(terminal, folder, "context.svg")


def start(folder, cast, rows, command):
    """Returns a terminal in which asciinema records a shell's command."""
    return Terminal(folder / "tmux", "asciinema", "rec", "--quiet", "--overwrite", "--command",
                    f"cd {folder} && {command}", str(folder / cast), rows=rows)


def wait_for_text(terminal, text):
    wait_for(lambda: "ENTER" in terminal.screen() or text in terminal.screen(), 20)
    if "ENTER" in terminal.screen():  # llama.vim warns of Vim 9.0, with which it works
        terminal.keys("Enter")
        wait_for(lambda: text in terminal.screen(), 20)


def complete(terminal, line, typed):
    """Types behind a line; then presses Tab, if a completion is shown within SHOWN_S."""
    terminal.type(f"/^{line}$")
    terminal.keys("Enter")
    terminal.keys("o", "C-u")
    for character in typed:
        terminal.type(character)
        time.sleep(KEY_S)
    if wait_for(lambda: shows_more_than(typed, terminal.screen()), SHOWN_S):
        time.sleep(1.5)
        terminal.keys("Tab")
    time.sleep(1)
    terminal.keys("Escape")


def leave(terminal):
    time.sleep(2)
    terminal.type(":q!")
    terminal.keys("Enter")


def finish(terminal, folder, svg):
    """Leaves Vim, and draws what was recorded."""
    leave(terminal)
    wait_for(lambda: not is_open(terminal), 20)
    cast = folder / f"{Path(svg).stem}.cast"
    subprocess.run(["termtosvg", "render", str(cast), str(DOCS / svg), "-D", "4000", "-M", "8000", "-m", "80"],
                   check=True)


def record_page(url, folder):
    """Writes docs/page.png."""
    browser = Browser(folder / "profile")
    try:
        browser.call("Page.navigate", url=url)
        browser.wait_for("document.readyState === 'complete' && typeof text !== 'undefined'")
        line, typed = TYPED[0]
        before, after = FILE.split(f"{line}\n")
        edit(browser, f"{before}{line}\n", f"\n{after}")
        browser.value("document.getElementById('one_line').click()")
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
    if len(sys.argv) < 2 or not os.environ.get("LLAMA_VIM"):
        sys.exit(__doc__)
    url = sys.argv[1].rstrip("/")
    pictures = sys.argv[2:] or ["vim", "context", "page"]
    with tempfile.TemporaryDirectory() as folder:
        if "vim" in pictures:
            record_vim(url, os.environ["LLAMA_VIM"], Path(folder))
        if "context" in pictures:
            record_context(url, os.environ["LLAMA_VIM"], Path(folder))
        if "page" in pictures:
            record_page(url, Path(folder))


if __name__ == "__main__":
    main()
