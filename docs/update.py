"""Make anew what the documentation keeps of programs: `make docs-update`.

    python docs/update.py               all of it
    python docs/update.py pages         the drawings, and the page of the gallery: in seconds
    python docs/update.py notebooks     the outputs of the notebooks
    python docs/update.py serve         the pictures of these examples

A picture is what an example saves with --plot. If an example fails, its picture stays as it was and
the command exits with 1.
"""

import ast
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DOCS = Path(__file__).resolve().parent
EXAMPLES = DOCS.parent / "fastattn" / "examples"
WIDEST = 1200  # pixels
COLOURS = 128

GALLERY = """# Gallery

Programs that use fastattn for a task, and print claims that they check: each exits with status 1
if one fails. They download nothing. Every picture was made by the command below it. First run
`pip install matplotlib scikit-learn tqdm`. After `pip install .` run them outside the checkout,
where [the compiled kernels](start/install.md#what-runs-here) are found.
"""


def docstring(name):
    return ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text("utf-8"))) or ""


def examples():
    """The examples, as fastattn.examples lists them."""
    return re.findall(r"python -m fastattn\.examples\.(\w+)", docstring("__init__"))


def entry(name):
    """The text of one example, in Markdown."""
    first, _, rest = docstring(name).partition("\n")
    kept = (line for line in rest.split("\n") if not line.startswith("    python -m"))
    rest = "\n".join(kept).strip("\n")
    return (
        f"\n## {name}\n\n{first}\n\n![What {name} plots](pictures/{name}.png)\n\n"
        f"{rest}\n\n```sh\npython -m fastattn.examples.{name} --plot\n```\n"
    )


def pages():
    """The text of each file that is made of the package's sources."""
    sys.path.insert(0, str(DOCS))
    import figures

    made = {DOCS / "gallery.md": GALLERY + "".join(map(entry, examples()))}
    for name, drawing in figures.FIGURES.items():
        made[DOCS / "drawings" / f"{name}.svg"] = drawing().svg()
    return made


def picture(name):
    """Run an example, and keep its picture with few colours, for a small repository."""
    from PIL import Image

    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder, "drawn.png")
        command = [sys.executable, "-m", f"fastattn.examples.{name}", "--plot", str(drawn)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout}{name} failed, and its picture stays as it was")
        image = Image.open(drawn).convert("RGB")
    if image.width > WIDEST:
        image = image.resize((WIDEST, round(image.height * WIDEST / image.width)), Image.LANCZOS)
    path = DOCS / "pictures" / f"{name}.png"
    image.quantize(COLOURS).save(path, optimize=True)
    print(f"{name}: {time.monotonic() - start:.0f} s, {path.stat().st_size >> 10} KiB", flush=True)


def notebook(path):
    """Execute a notebook, and keep its outputs, without what differs from run to run."""
    import nbformat
    from nbclient import NotebookClient

    content = nbformat.read(path, as_version=4)
    client = NotebookClient(content, kernel_name="python3", record_timing=False)
    client.execute(cwd=str(path.parent))
    content.metadata = {"kernelspec": content.metadata.kernelspec}
    nbformat.write(content, path)
    print(path.relative_to(DOCS))


def main(names):
    for name in names or ["pages", "notebooks", *examples()]:
        if name == "pages":
            for path, text in pages().items():
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, "utf-8")
        elif name == "notebooks":
            for path in sorted(DOCS.glob("notebooks/*.ipynb")):
                notebook(path)
        else:
            picture(name)


if __name__ == "__main__":
    main(sys.argv[1:])
