"""Pages that are files of the repository: their relative links lead to where those files are."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = r"`+[^`]+`+"
LINK = re.compile(rf"{CODE}|(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#]+)(#[^)]*)?\)")


def with_links(text, folder, address):
    """text of a file in `folder` with links below `address`; pictures are files of this machine."""

    def replaced(found):
        mark, words, path, anchor = found.groups()
        if path is None:
            return found[0]
        target = (folder / path).resolve()
        if mark:
            return f"![{words}]({Path('/..') / target.relative_to(ROOT)})"
        return f"[{words}]({address}/blob/main/{target.relative_to(ROOT)}{anchor or ''})"

    return LINK.sub(replaced, text)


def on_include(app, relative, parent, content):
    path = Path(app.srcdir, relative).resolve()
    if path.suffix == ".md":
        address = app.config.html_theme_options["source_repository"].rstrip("/")
        content[0] = with_links(content[0], path.parent, address)


def setup(app):
    app.connect("include-read", on_include)
    return {"parallel_read_safe": True}
