"""The manifest of a corpus, and the folder that holds it: what is there, what is in the way, and how it comes there."""
import json
import os
from collections import Counter
from dataclasses import asdict

from nanochat.common import BadInput, counted, say

TRAIN_DIR = "base_data_v3"
VAL_DIR = "val"
MANIFEST = "manifest.json"


def make_manifest(flags, sources, stats, val_projects, totals):
    """Returns the manifest: flags, held-out projects, totals, and for each source its version, licences and counts."""
    entries = {}  # one for all pieces of a table
    for source, stat in zip(sources, stats, strict=True):
        side = VAL_DIR if source.project in val_projects else TRAIN_DIR
        entry = {"name": source.name, "version": source.version, "project": source.project, "side": side}
        if source.origin:
            entry["origin"] = source.origin
        if source.columns:
            entry["columns"] = dict(source.columns)
        place = (source.name, source.directory) if source.columns else source
        before = entries.get(place, {})
        for name, value in stat.items():
            entry[name] = _sum(before[name], value) if name in before else value
        entries[place] = entry
    return {"flags": {**asdict(flags), "val_projects": list(flags.val_projects)}, "val_projects": sorted(val_projects),
            "totals": totals, "dropped": dict(all_dropped(stats)), "sources": list(entries.values())}


def _sum(one, other):
    """Returns the sum of two numbers, or of two dicts of numbers."""
    return dict(Counter(one) + Counter(other)) if isinstance(one, dict) else one + other


def all_dropped(stats):
    return sum((Counter(stat["dropped"]) for stat in stats), Counter())


def counts(dropped):
    """Returns the numbers of dropped files as text, such as "46 generated, 7 empty"."""
    return ", ".join(f"{count} {reason}" for reason, count in Counter(dropped).most_common() if count) or "none"


def publish(staging, out_dir):
    """Moves a finished corpus to the directories in which training looks for it. If killed, it can be called again."""
    for partial in staging.rglob("*.partial"):  # of tasks that were killed
        partial.unlink(missing_ok=True)
    # The manifest moves last, because `holds` takes a folder with a manifest for whole.
    for name in (TRAIN_DIR, VAL_DIR, MANIFEST):
        if (staging / name).exists():
            os.replace(staging / name, out_dir / name)


def holds(out_dir, identity):
    """Returns whether `out_dir` holds the corpus of this identity, with all shards."""
    path = out_dir / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        sizes = {name: shard["bytes"] for name, shard in manifest["shards"].items()}
        is_same = manifest["identity"] == identity
    except FileNotFoundError:
        return False
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BadInput(f"{path} is not a manifest of this script ({error}): move it away, or choose another "
                       "--out_dir") from None
    there = {str(shard.relative_to(out_dir)): shard.stat().st_size for shard in out_dir.glob("*/shard_*.parquet")}
    return is_same and sizes.items() <= there.items()


def check_out_dir(out_dir):
    """Raises BadInput if the corpus cannot be put into `out_dir`, because something else is there."""
    for name in (TRAIN_DIR, VAL_DIR):
        path = out_dir / name
        if path.is_symlink() or path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise BadInput(f"{path} holds other data, or not all of this, or is a link: move it away, or choose "
                           "another --out_dir")


def report(manifest, out_dir):
    print(f"read {sum(source['files'] for source in manifest['sources'])} files; dropped {counts(manifest['dropped'])}")
    for name, total in manifest["totals"].items():
        print(f"{out_dir / name}: {total['documents']} documents, {total['bytes'] / 1e6:.1f} MB of text, "
              f"{counted(total['shards'], 'shard')}")
    if manifest["val_projects"]:
        say(f"projects held out for validation: {', '.join(manifest['val_projects'])}")
    print(f"versions, licences and numbers of files: {out_dir / MANIFEST}")
