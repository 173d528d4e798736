"""Tells the licence of each file of a source: from its LICENSE or COPYING, or from debian/copyright."""
import re

from nanochat.corpus.archives import MAX_LICENCE_BYTES
from nanochat.corpus.sources import LICENCE_FILE, iter_files, readable

# Debian's short names of licences, and the phrases by which their texts are recognised. The phrase that comes first in
# a text decides; of two that begin at the same character, the one that comes first in this list.
_LICENCE_PHRASES = [(name, re.compile(phrase, re.IGNORECASE)) for name, phrase in [
    ("AGPL-3", r"GNU AFFERO GENERAL PUBLIC"),
    ("LGPL-3", r"GNU LESSER GENERAL PUBLIC LICENSE(?s:.{0,120}?)version 3"),
    ("LGPL-2.1", r"GNU LESSER GENERAL PUBLIC LICENSE"),
    ("LGPL-2", r"GNU LIBRARY GENERAL PUBLIC LICENSE"),
    ("GPL-3", r"GNU GENERAL PUBLIC LICENSE(?s:.{0,120}?)version 3"),
    ("GPL-2", r"GNU GENERAL PUBLIC LICENSE"),
    ("Apache-2.0", r"Apache License"),
    ("MPL-2.0", r"Mozilla Public License"),
    ("BSL-1.0", r"Boost Software License"),
    ("Expat", r"Permission is hereby granted, free of charge"),
    ("BSD-3-clause", r"Redistribution and use in source and binary(?s:.{0,1200}?)(?:Neither the|used to endorse)"),
    ("BSD-2-clause", r"Redistribution and use in source and binary"),
    ("Zlib", r"without any express or implied\s+warranty(?s:.{0,600}?)altered source versions"),
    ("public-domain", r"public domain|free and unencumbered"),
]]


def licence_finder(source):
    """Returns a function that maps the path of a file to the short name of its licence, or to "unknown".

    The licence is that of the source if it is known. Otherwise it is read from the first file that is either a LICENSE
    or COPYING at the top level or debian/copyright. Raises BadInput if it cannot be read.
    """
    rules = [("*", source.licence or "unknown")]
    if not source.licence:
        for path, nbytes, read in iter_files(source):
            if LICENCE_FILE.fullmatch(path) and nbytes <= MAX_LICENCE_BYTES:
                with readable():
                    rules += _licence_rules(read().decode("utf-8", "replace"))
                break
    # The last rule that matches applies. Plain paths are looked up: boost has 39,000, and 173 rules with wildcards.
    last_rule = {glob: order for order, (glob, _) in enumerate(rules)}
    wildcards = [(order, re.compile(re.escape(glob).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL))
                 for glob, order in last_rule.items() if "*" in glob or "?" in glob]
    wildcards.sort(key=lambda wildcard: -wildcard[0])

    def licence_of(path):
        # The wildcards are in falling order, so the first that matches is the last rule that does. Rule 0, "*", matches
        # every path.
        order = next(order for order, pattern in wildcards if pattern.fullmatch(path))
        return rules[max(order, last_rule.get(path, 0))][1]
    return licence_of


def _licence_rules(text):
    """Returns [(path with wildcards, short name)] for a licence text or a machine-readable debian/copyright."""
    rules = []
    for paragraph in re.split(r"\n\s*\n", text):
        fields = dict(re.findall(r"^(Files|License):[ \t]*(.*(?:\n[ \t].*)*)", paragraph, re.MULTILINE))
        if "Files" in fields and fields.get("License", "").strip():
            rules += [(glob, fields["License"].splitlines()[0].strip()) for glob in fields["Files"].split()]
    found = [(match.start(), order, name) for order, (name, phrase) in enumerate(_LICENCE_PHRASES)
             if (match := phrase.search(text))]
    if not rules and found:
        rules = [("*", min(found)[2])]
    return rules
