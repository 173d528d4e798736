"""scripts.lsp, as a program that an editor starts, completes with a real model. Its clients are pygls' and npm's.

npm's client is taken from NODE_CLIENTS, where `npm install --ignore-scripts vscode-languageserver-protocol@3.18.5` was
run.
"""
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from lsprotocol import types
from pygls.lsp.client import LanguageClient
from pygls.workspace import Workspace

from nanochat.common import BadInput
from nanochat.serve.lsp import MAX_OTHERS, make_language_server, other_files, request_at
from tests.serve.conftest import AFTER, BEFORE, REST, wait_until
from tests.serve.test_server_clients import node_client

COMMAND = (sys.executable, "-m", "scripts.lsp")
URI = "file:///project/add.cpp"
INITIALIZE = (b'Content-Length: 83\r\n\r\n{"jsonrpc": "2.0", "id": 1, "method": "initialize", '
              b'"params": {"capabilities": {}}}')


@asynccontextmanager
async def editor(url, encodings=("utf-16",), roots=(), env=None):
    """Yields a client of a scripts.lsp that was started and asks the server at `url`, and a list of its messages."""
    client = LanguageClient("test", "1")
    messages = []
    client.feature(types.WINDOW_SHOW_MESSAGE)(lambda params: messages.append(params.message))
    await client.start_io(*COMMAND, f"--url={url}", env=os.environ | (env or {}))
    folders = [types.WorkspaceFolder(uri=Path(root).as_uri(), name="root") for root in roots]
    answer = await client.initialize_async(types.InitializeParams(
        capabilities=types.ClientCapabilities(general=types.GeneralClientCapabilities(position_encodings=encodings)),
        workspace_folders=folders))
    assert answer.capabilities.inline_completion_provider and answer.capabilities.position_encoding == encodings[0]
    client.initialized(types.InitializedParams())
    yield client, messages
    await client.shutdown_async(None)
    client.exit(None)
    await asyncio.wait_for(client.stop(), 60)
    assert client._server.returncode == 0


def open_file(client, text, uri=URI):
    client.text_document_did_open(types.DidOpenTextDocumentParams(types.TextDocumentItem(uri, "cpp", 1, text)))


def change(client, version, begin, end, text):
    """Replaces the text between two pairs of a line and a character."""
    span = types.Range(types.Position(*begin), types.Position(*end))
    client.text_document_did_change(types.DidChangeTextDocumentParams(
        types.VersionedTextDocumentIdentifier(version, URI), [types.TextDocumentContentChangePartial(span, text)]))


def asked(line, character, chosen=None, uri=URI):
    return types.InlineCompletionParams(
        types.InlineCompletionContext(types.InlineCompletionTriggerKind.Automatic, chosen),
        types.TextDocumentIdentifier(uri), types.Position(line, character))


async def complete(client, *arguments, **options):
    """Returns the (text, (line, character) of its range's begin and end) of each item."""
    params = asked(*arguments, **options)
    items = await asyncio.wait_for(client.text_document_inline_completion_async(params), 60)
    return [(item.insert_text, (item.range.start.line, item.range.start.character),
             (item.range.end.line, item.range.end.character)) for item in items]


@pytest.mark.parametrize("encoding, end", [("utf-16", 11), ("utf-8", 15), ("utf-32", 10)])
def test_what_is_typed_is_completed_at_its_position(client, encoding, end):
    async def run():
        async with editor(client.base_url, (encoding,)) as (lsp, messages):
            open_file(lsp, "\f\n" + BEFORE + AFTER)  # a form feed ends no line of LSP
            change(lsp, 2, (2, 0), (2, 0), "    /*漢🎉*/ret")
            change(lsp, 3, (2, 4), (2, end), "")
            assert await complete(lsp, 2, 7) == [(REST, (2, 7), (2, 7))]
            change(lsp, 4, (2, 7), (2, 7), "u")
            assert await complete(lsp, 2, 8) == [(REST[1:], (2, 8), (2, 8))]
            chosen = types.SelectedCompletionInfo(types.Range(types.Position(2, 4), types.Position(2, 8)), "return")
            assert await complete(lsp, 2, 8, chosen) == [("return a + b;", (2, 4), (2, 8))]
            assert messages == []

    asyncio.run(run())


def test_a_document_that_is_not_open_gets_nothing_and_an_odd_name_or_crlf_hinders_no_other(client):
    async def run():
        async with editor(client.base_url) as (lsp, _):
            assert await complete(lsp, 1, 7) == []
            open_file(lsp, "int x;", "file:///project/%00.cpp")
            open_file(lsp, (BEFORE + "    ret" + AFTER).replace("\n", "\r\n"))
            assert await complete(lsp, 1, 7) == [(REST, (1, 7), (1, 7))]
            lsp.text_document_did_close(types.DidCloseTextDocumentParams(types.TextDocumentIdentifier(URI)))
            assert await complete(lsp, 1, 7) == []

    asyncio.run(run())


def test_a_cancelled_request_frees_the_model_and_a_missing_server_is_said_once(slow):
    completer, client, server = slow

    async def run():
        async with editor(client.base_url) as (lsp, _):
            open_file(lsp, BEFORE + AFTER)
            open_file(lsp, "int other;", "file:///project/other.cpp")
            request = lsp.protocol.send_request(types.TEXT_DOCUMENT_INLINE_COMPLETION, asked(1, 0), msg_id="1")
            await asyncio.to_thread(completer.begun.wait, 60)
            lsp.cancel_request(types.CancelParams("1"))
            with pytest.raises(Exception, match="cancel"):
                await asyncio.wait_for(asyncio.wrap_future(request), 60)
            await asyncio.to_thread(wait_until, lambda: [job.future.done() for job in server.thread._jobs] == [True])
            assert completer.asked < 47 and completer.extras == [[("other.cpp", "int other;")]]
        async with editor("http://127.0.0.1:1") as (lsp, messages):
            open_file(lsp, BEFORE + AFTER)
            assert [await complete(lsp, 1, 0) for _ in range(3)] == [[], [], []]
            assert messages == ["nanochat: no answer of http://127.0.0.1:1 (ConnectError): start python3 -m "
                                "scripts.serve"]

    asyncio.run(run())


def workspace_of(files, roots=()):
    """Returns a workspace in which the `files`, {path: text}, are open, the last one used last, and its document."""
    workspace = Workspace(None, workspace_folders=[types.WorkspaceFolder(root.as_uri(), "") for root in roots])
    for path, text in files.items():
        workspace.put_text_document(types.TextDocumentItem(path.as_uri(), "cpp", 1, text))
    return workspace, workspace.get_text_document(path.as_uri())


def test_open_files_and_what_they_include_are_read_within_a_budget(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for name, text in {"a/src/part.h": "part on disk", "a/src/util.h": "util.h", "b/include/lib/api.h": "api.h",
                       "a/big.h": "x" * MAX_OTHERS, "outside.h": "secret"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    os.mkfifo(a / "src/pipe.h")  # reading it would wait for ever
    text = "  #  include <lib/api.h>  // C++\n#include <vector>\n"
    for name in ("part.h", "main.cpp", "big.h", "no.h", "pipe.h", "../../outside.h", tmp_path / "outside.h", "src"):
        text += f'#include "{name}"\n'
    opened = {a / "src/part.h": "part in its buffer", a / "src/util.cpp": '#include "util.h"\nint util;',
              a / "src/main.cpp": text}
    util = '#include "util.h"\nint util;'
    assert other_files(*workspace_of(opened, (a, b))) == [
        ("src/util.h", "util.h"), ("src/util.cpp", util), ("src/part.h", "part in its buffer"),
        ("include/lib/api.h", "api.h")]
    assert other_files(*workspace_of(opened)) == [
        ("util.h", "util.h"), ("util.cpp", util), ("part.h", "part in its buffer")]


def test_files_of_the_folder_fill_the_room_that_is_left_those_with_similar_names_first(tmp_path):
    for name in ("reader.cc", "read_only.h", "Zip.CPP", "notes.txt", "part.h", "core"):
        (tmp_path / name).write_text(f"{name} on disk")
    (tmp_path / "big.cc").write_text("x" * MAX_OTHERS)
    os.mkfifo(tmp_path / "read_pipe.h")  # reading it would wait for ever
    (tmp_path / "outside.h").symlink_to(tmp_path.parent)
    (tmp_path / "folder.h").mkdir()
    opened = {tmp_path / "reader.cc": "the buffer", tmp_path / "open.txt": "open",
              tmp_path / "reader.h": '#include "part.h"'}
    texts = ["Zip.CPP on disk", "read_only.h on disk", "the buffer", "open", "part.h on disk"]
    assert [text for _, text in other_files(*workspace_of(opened, [tmp_path]))] == texts


@pytest.mark.parametrize("uri", ["untitled:new.c", "untitled:{folder}/new.c", "vscode-vfs://github{folder}/new.c",
                                 "http://host{folder}/new.c", "new.c", "file:new.c", "file:///\ud800/new.c"])
def test_a_document_that_is_no_file_is_near_no_file(tmp_path, monkeypatch, uri):
    (tmp_path / "secret.c").write_text("secret")
    monkeypatch.chdir(tmp_path)
    uri = uri.format(folder=tmp_path)
    workspace, _ = workspace_of({tmp_path.parent / "other.c": "other"})
    workspace.put_text_document(types.TextDocumentItem(uri, "c", 1, '#include "secret.c"'))
    assert [text for _, text in other_files(workspace, workspace.get_text_document(uri))] == ["other"]


def test_names_without_a_file_cost_little(tmp_path, monkeypatch):
    (tmp_path / "part.h").write_text("part")
    text = "#include <vector>\n" * 50_000 + '#include "part.h"\n'
    found = []
    monkeypatch.setattr("nanochat.serve.lsp.real_path", lambda path: found.append(path) or Path(path))
    for i in range(20):
        text = f'#include "no{i}.h"\n#include "part.h"\n{text}'
    opened = {tmp_path / f"{i}.cpp": text for i in range(20)}
    assert other_files(*workspace_of(opened, [tmp_path]))[-1][1] == "part"
    assert len(found) == 20 + 1 + 1  # the open files, the folder, part.h


@pytest.mark.parametrize("line, count", [("    ret", 4), ("\tret", 1), ("ret", 0), ("    ", 0)])
def test_the_server_is_told_the_indentation_of_the_line_that_is_typed(tmp_path, line, count):
    workspace, document = workspace_of({tmp_path / "a.cpp": f"  x\n{line}\n}}\n"})
    assert request_at(workspace, document, asked(1, len(line)))[2]["n_indent"] == count
    assert request_at(workspace, document, asked(9, 9))[2]["input_suffix"] == ""  # behind the end


NODE = """
const {spawn} = require("child_process");
const [command, url, uri, text] = process.argv.slice(1);
const protocol = require(command);
const {StreamMessageReader, StreamMessageWriter, createProtocolConnection} = protocol;
const [python, ...flags] = [process.env.PYTHON, "-m", "scripts.lsp", `--url=${url}`];
const child = spawn(python, flags, {stdio: ["pipe", "pipe", "inherit"]});
const connection = createProtocolConnection(
    new StreamMessageReader(child.stdout), new StreamMessageWriter(child.stdin));
connection.listen();
(async () => {
  const capabilities = {textDocument: {inlineCompletion: {}}, general: {positionEncodings: ["utf-16"]}};
  const made = await connection.sendRequest(protocol.InitializeRequest.type,
      {processId: process.pid, rootUri: null, capabilities, workspaceFolders: null});
  await connection.sendNotification(protocol.InitializedNotification.type, {});
  const textDocument = {uri, languageId: "cpp", version: 1, text};
  await connection.sendNotification(protocol.DidOpenTextDocumentNotification.type, {textDocument});
  const range = {start: {line: 1, character: 0}, end: {line: 1, character: 0}};
  await connection.sendNotification(protocol.DidChangeTextDocumentNotification.type,
      {textDocument: {uri, version: 2}, contentChanges: [{range, text: "    ret"}]});
  const params = {textDocument: {uri}, position: {line: 1, character: 7}, context: {triggerKind: 2}};
  const items = await connection.sendRequest(protocol.InlineCompletionRequest.type, params);
  const source = new protocol.CancellationTokenSource();
  const cancelled = connection.sendRequest(protocol.InlineCompletionRequest.type, params, source.token);
  source.cancel();
  const error = await cancelled.then(() => "answered", (error) => error.code);
  await connection.sendRequest(protocol.ShutdownRequest.type);
  await connection.sendNotification(protocol.ExitNotification.type);
  child.on("exit", (status) => {
    console.log(JSON.stringify({provider: made.capabilities.inlineCompletionProvider, items, error, status}));
    process.exit(0);
  });
})();
"""


@pytest.mark.slow
def test_the_client_of_vs_code_gets_completions_and_cancels(client):
    package = node_client("vscode-languageserver-protocol/lib/node/main.js")
    done = subprocess.run(["node", "-e", NODE, str(package), str(client.base_url), URI, BEFORE + AFTER],
                          capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHON": sys.executable})
    found = json.loads(done.stdout or "{}")
    at = {"line": 1, "character": 7}
    assert found.get("items") == [{"insertText": REST, "range": {"start": at, "end": at}}], done.stderr
    assert found["provider"] == {} and found["error"] in (-32800, "answered") and found["status"] == 0


NEOVIM = """
vim.lsp.start({name = 'nanochat', cmd = {vim.env.PYTHON, '-m', 'scripts.lsp', '--url=' .. vim.env.URL}})
assert(vim.wait(60000, function() return vim.lsp.get_clients()[1] and vim.lsp.get_clients()[1].initialized end))
vim.o.paste = true  -- no indentation of its own
vim.cmd('normal! 2Go/*漢🎉*/    xet')  -- line 3, typed wrongly and mended
vim.cmd('normal! 2Gdd06xfxrr')
local params = vim.lsp.util.make_position_params(0, vim.lsp.get_clients()[1].offset_encoding)
params.position.character = 7
params.context = {triggerKind = 2}
local answer = vim.lsp.buf_request_sync(0, 'textDocument/inlineCompletion', params, 60000)
io.stdout:write(vim.json.encode({vim.api.nvim_buf_get_lines(0, 0, -1, true), answer}))
vim.cmd('qa!')
"""


@pytest.mark.slow
def test_neovims_client_keeps_the_text_in_step(client, tmp_path):
    nvim = shutil.which("nvim") or pytest.skip("there is no nvim")
    if subprocess.run([nvim, "--clean", "--headless", "+lua os.exit(vim.fn.has('nvim-0.11'))"]).returncode != 1:
        pytest.skip("nvim is older than 0.11")
    (tmp_path / "add.cpp").write_text(BEFORE + "\n" + AFTER.removeprefix("\n"))
    (tmp_path / "ask.lua").write_text(NEOVIM)
    done = subprocess.run([nvim, "--clean", "--headless", str(tmp_path / "add.cpp"), "-S", str(tmp_path / "ask.lua")],
                          capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHON": sys.executable, "URL": str(client.base_url)})
    lines, [answer] = json.loads(done.stdout)
    assert lines[1] == "    ret" and [item["insertText"] for item in answer["result"]] == [REST]


@pytest.mark.parametrize("url", ["http://[x", "localhost:8012", "http://x/v1", ""])
def test_what_is_no_address_is_one_line(url):
    with pytest.raises(BadInput, match=re.escape(f"--url={url} is no address")):
        make_language_server(url)


def test_ctrl_c_ends_it_though_its_input_is_open():
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    process.stdin.write(INITIALIZE)
    process.stdin.flush()
    assert process.stdout.readline().startswith(b"Content-Length: ")
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(60) == 130 and process.stderr.read() == b"stopped by Ctrl-C\n"
    finally:
        process.communicate()


def test_a_closed_input_is_one_line():
    done = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *COMMAND], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "standard input" in done.stderr and done.stderr.count("\n") == 1


def test_an_editor_that_has_died_leaves_no_traceback():
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    process.stdin.write(INITIALIZE)
    process.stdin.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0
