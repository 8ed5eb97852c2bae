"""The table of contents, made of the lists of pages: a page named index lists others as
`- [title](page.md)`, below a heading or none, and each list becomes a toctree as well."""

import re

HEADING = re.compile(r"^## (.+)$", re.M)
ITEM = re.compile(r"^- \[[^\]]*\]\(((?:\w+/)*\w+)\.(?:md|ipynb)\)", re.M)


def with_toctrees(text):
    parts = ["", *HEADING.split(text)]
    for caption, section in zip(parts[::2], parts[1::2]):
        if pages := ITEM.findall(section):
            lines = [":hidden:", *[f":caption: {caption}"] * bool(caption), "", *pages]
            text += "\n".join(["\n```{toctree}", *lines, "```\n"])
    return text


def on_read(app, page, content):
    if page.rpartition("/")[2] == "index":
        content[0] = with_toctrees(content[0])


def setup(app):
    app.connect("source-read", on_read, priority=600)  # after the links (repository.py)
    return {"parallel_read_safe": True}
