"""Make anew what the documentation keeps of programs: `make docs-update`.

    python docs/update.py               the pictures of the gallery, in minutes, and the notebook
    python docs/update.py serve         the pictures of these examples
    python docs/update.py notebooks     the outputs of the notebooks

A picture is what an example saves with --plot. Exits with 1 if an example fails.
"""

import io
import subprocess
import sys
import time
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "extensions"))

import gallery  # noqa: E402

WIDEST = 1200  # pixels
COLOURS = 128


def picture(name):
    """Run an example, and keep its picture with few colours, for a small repository."""
    from PIL import Image

    path = gallery.PICTURES / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    start = time.monotonic()
    command = [sys.executable, "-m", f"fastattn.examples.{name}", "--plot", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
    if image.width > WIDEST:
        image = image.resize((WIDEST, round(image.height * WIDEST / image.width)), Image.LANCZOS)
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
    if not names or names == ["notebooks"]:
        for path in sorted(DOCS.glob("notebooks/*.ipynb")):
            notebook(path)
    for name in names or gallery.names():
        if name != "notebooks":
            picture(name)


if __name__ == "__main__":
    main(sys.argv[1:])
