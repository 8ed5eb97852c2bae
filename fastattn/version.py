"""The version of a build: of the last git tag v*, of an sdist, else FALLBACK.

scikit-build-core calls `dynamic_metadata` when it builds the package (pyproject.toml). An installed
package has the result in its metadata, which `fastattn.__version__` reads.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

FALLBACK = "0.1.0"  # without git, tags or metadata; the next release
PATTERN = r"v([0-9]+(?:[.][0-9]+)*(?:(?:a|b|rc)[0-9]+)?)-(\d+)-(g[0-9a-f]+)"  # tag, commits, commit
ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR")  # in hooks they name another checkout


def dynamic_metadata(field: str, settings: object = None) -> str:
    """The version of this checkout or sdist (PEP 440)."""
    if field != "version" or settings:
        raise ValueError(f"got field {field!r} and settings {settings!r}, expected 'version', none")
    root = Path(__file__).resolve().parents[1]
    return of_sdist(root) or of_tags(root) or FALLBACK


def of_sdist(root: Path) -> str | None:
    """The version in PKG-INFO, which an sdist contains."""
    path = root / "PKG-INFO"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(r"^Version: (.+)$", text, re.M)
    return found.group(1).strip() if found else None


def of_tags(root: Path) -> str | None:
    """0.2.0 at the tag v0.2.0, and 0.2.0.post3+g<commit> three commits after it. Prereleases, as
    v0.2.0rc1, count too; other tags do not."""
    if _git(root, "rev-parse", "--show-toplevel") != str(root):
        return None  # no checkout, or a folder inside another project's
    tags = ("--tags", "--match", "v[0-9]*", "--exclude", "v*[!0-9.abrc]*")
    known = re.fullmatch(PATTERN, _git(root, "describe", "--long", *tags))
    if known is None:
        return None
    version, commits, commit = known.groups()
    return version if commits == "0" else f"{version}.post{commits}+{commit}"


def _git(root: Path, *arguments: str) -> str:
    try:
        return subprocess.run(
            # git refuses a checkout of another user, but a build of it trusts it already.
            ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments],
            env={name: x for name, x in os.environ.items() if name not in ELSEWHERE},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
