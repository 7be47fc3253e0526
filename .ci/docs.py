"""Build the documentation site in _docs/ from the notebooks, and check it.

nbdev works the notebooks over into _proc/ (it adds the API of every exported function and links the names in the prose), then Quarto
renders them where it is installed, else smalldocs does, in Python and from the same _quarto.yml. Either way the equations are
MathML, so that a page needs no script and no network to show them.

    python .ci/docs.py             build _docs/
    python .ci/docs.py --check     check the site that is there
"""
import ast
import html
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
PROC, STAGE, SITE = ROOT / "_proc", ROOT / "_proc" / "_stage", ROOT / "_docs"
LINK = re.compile(r"(!?\[[^\]]*\]\()(?!\w+:|#|/)([^)#\s]+)|(\b(?:src|href)=\")(?!\w+:|#|/)([^\"#]+)")


def process():
    "Notebooks -> _proc/, by nbdev. Only what changed is done again."
    import nbdev.serve
    from nbdev.quarto import refresh_quarto_yml

    refresh_quarto_yml()
    for page in PROC.rglob("*.ipynb"):
        if not (ROOT / "nbs" / page.relative_to(PROC)).exists():
            page.unlink()
    nbdev.serve.FilterDefaults = filters()
    nbdev.serve.proc_nbs(n_workers=0)  # in this process: torch is imported once


def filters():
    "nbdev's own processors, with the source of what is exported left on the page, after its API, and no more cells run than that needs."
    import nbdev.processors as P

    def defines(cell):
        return any(not isinstance(n, (ast.Import, ast.ImportFrom)) for n in cell.parsed_() or [])

    class show_source(P.Processor):
        "`export` becomes `exports`, where there is more than imports to show."

        def cell(self, cell):
            if cell.cell_type == "code" and "export" in cell.directives_ and defines(cell):
                cell.directives_["exports"] = cell.directives_.pop("export")

    class api_first(P.Processor):
        "The signatures and tables of a cell, then its source."

        def begin(self):
            cells = self.nb.cells
            for source in [c for c in cells if c.cell_type == "code" and "exports" in c.directives_]:
                at = cells.index(source)
                while at + 1 < len(cells) and getattr(cells[at + 1], "has_sd", False):
                    cells[at], cells[at + 1] = cells[at + 1], cells[at]
                    at += 1

    class run_api(P.exec_show_docs):
        """nbdev runs a cell whole as soon as anything in it is imported. The API needs the exported cells and the plain imports, so run
        just those: a page builds without the data and the minutes that its other cells may want."""

        def __call__(self, cell):
            if not self.nb.has_docs_ or cell.cell_type != "code" or not cell.source or P.cell_lang(cell) != "python":
                return
            if cell.directives_.keys() & {"export", "exports", "exporti"} or P._is_showdoc(cell):
                self.k.cell(cell)
            else:
                imports = [ast.unparse(n) for n in cell.parsed_() or [] if isinstance(n, (ast.Import, ast.ImportFrom))]
                self.k.run_cell("\n".join(imports))
            if self.k.exc:
                raise RuntimeError(f"{self.nb.frontmatter_.get('title')}, cell {cell.idx_}:\n{cell.source}") from self.k.exc

    def fold(cell):
        if cell.cell_type == "code" and "exports" in cell.directives_:
            cell.source = f'#| code-fold: show\n#| code-summary: "Source"\n{cell.source}'

    class Filters(P.FilterDefaults):
        def base_procs(self):
            swap = {"exec_show_docs": run_api, "mv_exports": api_first, "add_fold": fold}
            procs = [swap.get(p.__name__, p) for p in super().base_procs()]
            procs.insert(procs.index(P.add_show_docs), show_source)
            return procs

    return Filters


def stage(rename):
    """_proc/ -> a folder to render. Links that leave nbs/ are put right (a figure is shown from a copy beside the pages, anything else is a
    file of the repository), links to the published site become links inside this one, and with `rename` a page takes the name that its
    front matter asks for, which Quarto does by itself."""
    from nbdev.config import get_config

    cfg = get_config()
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(PROC, STAGE, ignore=lambda d, names: [n for n in names if n in ("_docs", "_stage")])
    for name in ("_quarto.yml", "nbdev.yml", "sidebar.yml", "styles.css"):
        shutil.copy(ROOT / "nbs" / name, STAGE)
    shutil.copytree(ROOT / "figures", STAGE / "figures", dirs_exist_ok=True)
    pages = {p.relative_to(STAGE): json.loads(p.read_text(encoding="utf-8")) for p in sorted(STAGE.rglob("*.ipynb"))}
    names = {}
    for path, notebook in pages.items():
        front = "".join(notebook["cells"][0]["source"]) if notebook["cells"][0]["cell_type"] == "raw" else ""
        asked = re.search(r"^output-file: (\S+)\.html$", front, re.M)
        names[path.as_posix()] = (path.with_name(asked[1] + ".ipynb") if asked and rename else path).as_posix()

    site = cfg.doc_host.rstrip("/") + "/" + cfg.doc_baseurl.strip("/") + "/"
    for path, notebook in pages.items():
        for cell in notebook["cells"]:
            join_streams(cell)
            texts = [cell] if cell["cell_type"] in ("markdown", "raw") else [o["data"] for o in cell.get("outputs", []) if "text/markdown" in o.get("data", {})]
            for box in texts:
                key = "source" if box is cell else "text/markdown"
                box[key] = relink("".join(box[key]), path, names, site, f"{cfg.git_url}/blob/{cfg.branch}")
                if rename and cell["cell_type"] == "raw":
                    box[key] = re.sub(r"^output-file:.*\n", "", box[key], flags=re.M)
        (STAGE / path).unlink()
        (STAGE / names[path.as_posix()]).write_text(json.dumps(notebook, ensure_ascii=False, indent=1), encoding="utf-8")
    sidebar = (STAGE / "sidebar.yml").read_text(encoding="utf-8")
    for old, new in names.items():
        sidebar = re.sub(rf"(?<![\w/]){re.escape(old)}(?!\w)", new, sidebar)
    (STAGE / "sidebar.yml").write_text(sidebar, encoding="utf-8")


def join_streams(cell):
    "What a cell printed in several goes, as one block."
    outs = []
    for out in cell.get("outputs", []):
        if outs and out["output_type"] == outs[-1]["output_type"] == "stream" and out["name"] == outs[-1]["name"]:
            outs[-1]["text"] = "".join(outs[-1]["text"]) + "".join(out["text"])
        else:
            outs.append(out)
    if "outputs" in cell:
        cell["outputs"] = outs


def relink(text, page, names, site, blob):
    "The links of one piece of Markdown, for a page at `page` (a path in nbs/)."
    folder = page.parent.as_posix()

    def move(m):
        before, target = m[1] or m[3], m[2] or m[4]
        path = os.path.normpath(f"nbs/{folder}/{target}").replace(os.sep, "/")
        if path.startswith("figures/"):
            return before + os.path.relpath(path, folder)
        if not path.startswith("nbs/"):
            return before + f"{blob}/{path}"
        return before + os.path.relpath(names.get(path[4:], path[4:]), folder)

    text = re.sub(r"```python\ndef \w+\(\n    \*args, \*\*kwargs\n\):\n```\n", "", text)  # says nothing; the source below has the fields
    text = re.sub(r"\[(`[\w.]*\b_\w+`)\]\([^)]*\)", r"\1", text)  # nbdev links private names too, which have no place on a page
    return LINK.sub(move, text).replace(site, os.path.relpath(".", folder) + "/")


# ---------------------------------------------------------------- equations

MATH = re.compile(r'<span class="math (inline|display)">\\[(\[](.*?)\\[)\]]</span>', re.S)
KATEX = re.compile(r'<(?:link|script)[^>]*katex[^>]*>(?:</script>)?\s*', re.I)
REWRITE = [  # TeX that readers' tools know and docutils does not
    (re.compile(r"\\operatorname\*"), r"\\operatorname"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\middle(?=[|\\/])"), ""),
    (re.compile(r"\\(?:boldsymbol|bm)\s*\\([A-Za-z]+)"), r"\\boldsymbol{\\\1}"),
    (re.compile(r"\\([bB]igg?)(?![A-Za-z])"), r"\\\1l"),
]


def mathml(tex, display):
    "One equation as MathML; `\\tag{n}` becomes a number at the right."
    from docutils.utils.math.latex2mathml import tex2mathml

    tag = re.search(r"\\tag\{([^}]*)\}", tex)
    if tag:
        tex = tex.replace(tag[0], "")
    for old, new in REWRITE:
        tex = old.sub(new, tex)
    out = re.sub(r">\s+<", "><", str(tex2mathml(tex.strip(), as_block=display)))
    out = out.replace("&ApplyFunction;", "&#8289;")
    if not display:
        return f'<span class="math inline">{out}</span>'
    number = f'<span class="eqno">({html.escape(tag[1])})</span>' if tag else ""
    return f'<span class="math display{" numbered" if tag else ""}">{out}{number}</span>'


def equations(page):
    "Turn the TeX of a page into MathML and drop the scripts that would have drawn it. Returns how many equations there were."
    text, bad = page.read_text(encoding="utf-8"), []

    def one(m):
        tex = html.unescape(m[2])
        try:
            return mathml(tex, m[1] == "display")
        except Exception as error:
            bad.append(f"{page.relative_to(SITE)}: {error} in the equation {tex!r}")
            return m[0]

    new, count = MATH.subn(one, text)
    page.write_text(KATEX.sub("", new), encoding="utf-8")
    if bad:
        sys.exit("\n".join(bad))
    return count


def render():
    "_proc/ -> _docs/. Returns what the renderer warned about."
    quarto = shutil.which("quarto")
    stage(rename=not quarto)
    shutil.rmtree(SITE, ignore_errors=True)
    warnings = []
    if quarto:
        subprocess.run(["quarto", "render", "--no-cache", "--no-execute"], cwd=STAGE, check=True)
    else:
        from smalldocs.site import build

        warnings = [w for w in build(STAGE, quiet=True).warnings if not re.search("html-math-method|html.grid", w)]  # for Quarto only
    shutil.move(STAGE / SITE.name, SITE)
    shutil.rmtree(STAGE)
    if not quarto:
        print(f"docs: {sum(equations(page) for page in SITE.rglob('*.html'))} equations as MathML")
    return warnings


# ---------------------------------------------------------------- checks

class Page(HTMLParser):
    "The ids, the links and the loaded things of one page."

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[k] for k in ("id", "name") if attrs.get(k)}
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        if tag == "link" and attrs.get("rel") in ("stylesheet", "icon", "preload", "modulepreload", "preconnect"):
            self.loads.append(attrs.get("href", ""))
        if attrs.get("src"):
            self.loads.append(attrs["src"])


def problems(site=SITE):
    "Broken internal links, and anything that a page would load from the network."
    pages = {p: Page(p.read_text(encoding="utf-8")) for p in site.rglob("*.html")}
    if not pages:
        yield "no page was built"
    for path, page in pages.items():
        where = path.relative_to(site)
        for link in page.loads + page.links:
            if re.match(r"(https?:)?//", link):
                if link in page.loads:
                    yield f"{where} loads {link} from the network"
                continue
            if re.match(r"\w+:", link):  # data:, mailto:
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / unquote(file.partition("?")[0])).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{where} links to {link}, which is not in the site"
            elif anchor and target in pages and unquote(anchor) not in pages[target].ids:
                yield f"{where} links to {link}, and there is no such place on that page"
    for file in [*site.rglob("*.css"), *pages]:
        for url in re.findall(r"(?:@import\s*|url\()\s*['\"]?((?:https?:)?//[^'\")\s]+)", file.read_text(encoding="utf-8")):
            yield f"{file.relative_to(site)} loads {url} from the network"
    for path in pages:
        if 'class="math' in (text := path.read_text(encoding="utf-8")) and (left := re.search(r'class="math[^>]*>\\[(\[][^<]*', text)):
            yield f"{path.relative_to(site)}: an equation is shown as TeX: {left[0]}"


if __name__ == "__main__":
    warnings = []
    if "--check" not in sys.argv:
        process()
        warnings = render()
    found = list(dict.fromkeys([*warnings, *problems()]))
    for line in found:
        print(f"docs: {line}")
    print(f"docs: {len(list(SITE.rglob('*.html')))} pages in _docs/, {len(found)} problems; open _docs/index.html")
    sys.exit(bool(found))
