"""The files of a project in dependency order, joined into documents."""
from nanochat.corpus.packing import CONTEXT_BYTES, DOCUMENT_BYTES, contexts, dependency_order, join_files
from tests.corpus.projects import cpp


def texts_of(**includes):
    """Returns {path: text} of files that include others; "a_h" stands for a.h."""
    return {name.replace("__", "/").replace("_", "."): "".join(f'#include "{path}"\n' for path in paths).encode()
            for name, paths in includes.items()}


def test_headers_come_right_before_the_first_file_that_includes_them():
    texts = texts_of(b_cpp=["b.h", "x/deep.h"], a_cpp=["a.h"], b_h=["a.h"], a_h=[], unused_h=[], x__deep_h=["../b.h"])
    assert dependency_order(texts) == ["a.h", "a.cpp", "b.h", "x/deep.h", "b.cpp", "unused.h"]
    texts["a.h"] = b'  #  include  "b.h"\n#include <c.h>\nint x; // #include "d.h"\n'
    texts |= {"c.h": b"", "d.h": b""}
    assert dependency_order(texts)[:3] == ["b.h", "a.h", "a.cpp"], "b.h includes a.h, which was begun: a circle"
    assert sorted(dependency_order(texts)) == sorted(texts)


def test_a_header_is_looked_for_beside_the_file_then_by_its_folders_then_near_it():
    texts = texts_of(src__m_cpp=["m.h", "lib/n.h", "o.h"], src__m_h=[], m_h=[], include__lib__n_h=[], include__n_h=[],
                     src__deep__o_h=[], other__o_h=[])
    assert dependency_order(texts)[:4] == ["src/m.h", "include/lib/n.h", "src/deep/o.h", "src/m.cpp"]


def test_a_long_chain_of_headers_needs_no_recursion():
    texts = {f"{number:05d}.h": f'#include "{number + 1:05d}.h"\n'.encode() for number in range(5000)}
    assert dependency_order(texts) == sorted(texts, reverse=True)


def test_a_project_that_is_long_becomes_several_documents_of_whole_files():
    texts = {f"{number}.cpp": cpp(number, 700).encode() for number in range(20)}
    documents = list(join_files(texts))
    assert len(documents) > 2 and [path for paths, _ in documents for path in paths] == sorted(texts)
    for paths, text in documents:
        assert len(text) <= DOCUMENT_BYTES
        assert text == b"".join(b"\0" + path.encode() + b"\n" + texts[path] for path in paths)


def test_a_context_has_the_files_beside_a_file_then_what_it_includes_the_nearest_last():
    texts = texts_of(src__main_cpp=["main.h", "b.h"], src__main_h=["c.h"], src__b_h=[], include__c_h=["src/main.cpp"],
                     src__mail_cpp=[], src__z_cpp=[], other__d_h=[])
    texts["src/main.cpp"] += b"#include <include/c.h>\n#include <main>\n"
    paths = {path: [part.split("\n")[0] for part in context.decode().split("\0")[1:]]
             for path, context in contexts(texts | {"src/main": b"int x;\n", "src/empty": b"/* nothing */"})}
    assert paths["src/main.cpp"] == ["include/c.h", "src/main", "src/main.h"]  # files without code are left out
    assert paths["src/z.cpp"] == ["include/c.h", "src/main.h", "src/main.cpp", "src/main"] and paths["other/d.h"] == []
    assert paths["include/c.h"] == ["src/main.h", "src/main.cpp"]


def test_a_context_is_condensed_and_within_its_budget():
    text = b"/* a\n licence */\n\nint f();  // twice\n\n\nconst char* s = \"//\";\n"
    found = dict(contexts({"a.h": text, "b.h": b"int g();\r\n"}))
    assert found == {"a.h": b"\0b.h\nint g();\n", "b.h": b"\0a.h\nint f();\nconst char* s = \"//\";\n"}
    found = dict(contexts({f"{number}.h": cpp(number, 700).encode() for number in range(9)}))
    assert all(CONTEXT_BYTES * 3 // 4 < len(context) <= CONTEXT_BYTES for context in found.values())
    assert all(context.count(b"\0") == 2 and context.endswith(b"}\n") for context in found.values())
