"""Write README.md from nbs/index.ipynb: its prose, its code and the text that the code printed. Standard library only.

    python .ci/readme.py           write README.md
    python .ci/readme.py --check   exit 1 if README.md is not what the notebook gives
"""
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Written by `make readme` from nbs/index.ipynb: edit that notebook, not this file. -->\n"
LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?:|mailto:|#|/)([^)#\s]+)")  # [text](target and ![text](target, relative targets only
SRC = re.compile(r"(\b(?:src|href)=\")(?!https?:|data:|mailto:|#|/)([^\"#]+)")


def from_root(text, folder):
    "Relative links of a notebook in `folder`, as seen from the root of the repository."
    move = lambda m: m[1] + os.path.normpath(os.path.join(folder, m[2])).replace(os.sep, "/")
    return SRC.sub(move, LINK.sub(move, text))


def options(source):
    "The `#|` lines that open a code cell, as a dict, and the code that is left."
    lines, found = source.split("\n"), {}
    while lines and lines[0].startswith("#|"):
        key, _, value = lines.pop(0)[2:].strip().partition(" ")
        found[key.rstrip(":")] = value.strip()
    return found, "\n".join(lines).strip("\n")


def fenced(text, lang=""):
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{lang}\n{text.rstrip()}\n{fence}"


def outputs(cell):
    "What a code cell printed or returned, as text. Pictures and progress bars stay in the notebook."
    printed = ""
    for out in cell["outputs"]:
        data = out.get("data", {})
        if out["output_type"] == "stream" and out["name"] == "stdout":
            printed += "".join(out["text"])
        elif "text/markdown" in data:
            if printed.strip():
                yield fenced(printed)
            printed = ""
            yield "".join(data["text/markdown"]).strip()
        elif "text/plain" in data and not any(kind.startswith("image/") for kind in data):
            printed += "".join(data["text/plain"]) + "\n"
    if printed.strip():
        yield fenced(printed)


def blocks(notebook, folder):
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield from_root(source.strip(), folder)
        elif cell["cell_type"] == "code":
            opts, code = options(source)
            if opts.keys() & {"hide", "default_exp", "export"} or opts.get("include") == "false":
                continue
            if code and opts.get("echo") != "false":
                yield fenced(code, "python")
            if opts.get("output") != "false":
                for text in outputs(cell):
                    yield from_root(text, folder)


def readme(root=ROOT):
    notebook = json.loads((root / "nbs" / "index.ipynb").read_text(encoding="utf-8"))
    return NOTE + "\n" + "\n\n".join(b for b in blocks(notebook, "nbs") if b) + "\n"


if __name__ == "__main__":
    text, path = readme(), ROOT / "README.md"
    same = path.exists() and path.read_text(encoding="utf-8") == text
    if "--check" in sys.argv:
        sys.exit(None if same else "README.md is not what nbs/index.ipynb gives: run `make readme` and commit both")
    if not same:
        path.write_text(text, encoding="utf-8", newline="\n")
    print(f"README.md: {'as it was' if same else 'written'}, {len(text.splitlines())} lines from nbs/index.ipynb")
