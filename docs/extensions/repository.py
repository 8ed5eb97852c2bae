"""Pages beside the repository's files. A page that is one link to such a file is that file: a hub
shows the link. Links to such a file lead to its page; links to other files of the repository lead
to where these are."""

import functools
import os
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
CODE = r"`+[^`]+`+"
LINK = re.compile(rf"{CODE}|(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#]+)(#[^)]*)?\)")
ALONE = re.compile(r"\[[^\]]*\]\(((?:\.\./)+[^)#]+)\)\s*")


@functools.cache
def files():
    """The file of each page that is one link."""
    found = {page: ALONE.fullmatch(page.read_text("utf-8")) for page in DOCS.rglob("*.md")}
    return {page: (page.parent / link[1]).resolve() for page, link in found.items() if link}


def with_links(text, folder, page, address):
    """text of a file in `folder`, as that of `page`; files without a page are below `address`."""
    pages = {file: at for at, file in files().items()}

    def replaced(found):
        mark, words, path, anchor = found.groups()
        if path is None:
            return found[0]
        target = (folder / path).resolve()
        target = pages.get(target, target)
        if mark or target.is_relative_to(DOCS):
            place = os.path.relpath(target, page.parent)
        else:
            place = f"{address}/blob/main/{target.relative_to(ROOT)}"
        return f"{mark}[{words}]({place}{anchor or ''})"

    return LINK.sub(replaced, text)


def on_read(app, name, content):
    page = Path(app.env.doc2path(name))
    if page.suffix == ".md":
        file = files().get(page, page)
        if file != page:
            app.env.note_dependency(str(file))
            content[0] = file.read_text("utf-8")
        address = app.config.html_theme_options["source_repository"].rstrip("/")
        content[0] = with_links(content[0], file.parent, page, address)


def setup(app):
    app.connect("source-read", on_read)
    return {"parallel_read_safe": True}
