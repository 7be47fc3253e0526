"""The one test runner: what `make test` runs.

    python .ci/check.py                   every check
    python .ci/check.py --only docs 03    the checks whose name contains one of these words
    python .ci/check.py --list            their names
    python .ci/check.py --run nbs/paper   only run these notebooks, here in the working tree (what `make figures` does)

Each check prints one line; a failed one prints the end of its output below it. The last line counts them. Checks that write work on a
copy of the working tree, so nothing here is changed, and a notebook cannot lean on a file that is not in the repository; only the
fetched demo assets in data/cache/ are shared.
"""
import argparse
import filecmp
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
WORKERS = 2  # notebooks at a time, each with one thread
MODULE_BUDGET_S = 240  # all module notebooks together, on two quiet cores; twice that fails, since machines are shared
MAX_NOTEBOOK_BYTES = 500_000


class Failed(Exception):
    "A check's verdict; the message is what is printed below its line."


def fail_if(problems):
    problems = list(problems)
    if problems:
        raise Failed("\n".join(problems))


# ---------------------------------------------------------------- the copy that the checks work on

def copy_tree(to):
    "The working tree without what is built, fetched or ignored."
    skip = {".git", ".venv", "_docs", "_proc", "__pycache__", ".ipynb_checkpoints", "build", "dist"}
    data = {"cache", "runs"}
    ignore = lambda folder, names: [n for n in names if n in skip or n.endswith(".egg-info") or (n in data and Path(folder) == ROOT / "data")]
    shutil.copytree(ROOT, to, ignore=ignore, symlinks=True)
    (ROOT / "data" / "cache").mkdir(parents=True, exist_ok=True)
    (to / "data" / "cache").symlink_to(ROOT / "data" / "cache", target_is_directory=True)
    return to


def environment(tree, **more):
    "What a check's programs see: the copy's package, one thread, no network from the model hub's client, no progress bars."
    env = dict(os.environ, PYTHONPATH=str(tree), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false",
               HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", MPLBACKEND="agg", PYTHONWARNINGS="ignore",
               COLUMNS="140", PATH=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    env.update(more)
    return env


def sh(tree, *args, timeout=600, **more):
    "Run a program in the copy; a failure carries the end of its output."
    done = subprocess.run([str(a) for a in args], cwd=tree, env=environment(tree, **more), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", timeout=timeout)
    if done.returncode:
        said = " ".join([Path(args[0]).name, *map(str, args[1:])]).replace("\n", " ")
        raise Failed(f"{done.stdout.rstrip()}\nexit {done.returncode} from: {said[:160]}")
    return done.stdout


def notebooks(tree=ROOT):
    return sorted(p for p in (tree / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


def differing(a, b, pattern):
    "Files of two folders that are missing on one side or differ."
    names = {p.relative_to(top) for top in (a, b) for p in top.glob(pattern) if "__pycache__" not in p.parts}
    for name in sorted(names):
        if not (a / name).exists() or not (b / name).exists():
            yield f"{name} is only in {'the repository' if (a / name).exists() else 'what the notebooks give'}"
        elif not filecmp.cmp(a / name, b / name, shallow=False):
            yield f"{name} differs from what the notebooks give"


# ---------------------------------------------------------------- checks of the repository

def check_versions(tree):
    "What is installed is what constraints.txt pins."
    from importlib.metadata import PackageNotFoundError, version

    def lines():
        for line in (ROOT / "constraints.txt").read_text().splitlines():
            name, sep, pin = line.partition("==")
            if not sep or line.startswith("#"):
                continue
            try:
                have = version(name).partition("+")[0]
            except PackageNotFoundError:
                have = "missing"
            if have != pin:
                yield f"{name}: {have}, pinned {pin}"

    fail_if(lines())


def check_export(tree):
    "Deleting the package and exporting the notebooks gives the committed package, file by file."
    work = copy_tree(tree.parent / "export")
    for module in (work / "routesae").glob("*.py"):
        if module.name != "__init__.py":
            module.unlink()
    sh(work, BIN / "nbdev_export")
    fail_if(differing(ROOT / "routesae", work / "routesae", "**/*.py"))


def check_clean(tree):
    "The notebooks are as nbdev_clean leaves them."
    work = copy_tree(tree.parent / "clean")
    sh(work, BIN / "nbdev_clean")
    fail_if(differing(ROOT / "nbs", work / "nbs", "**/*.ipynb"))


def check_readme(tree):
    "README.md is what nbs/index.ipynb gives."
    sh(ROOT, sys.executable, ".ci/readme.py", "--check")


def check_orphans(tree):
    "Every module says which notebook it comes from, that notebook exists, and no two notebooks export to one module."
    def lines():
        for module in sorted((ROOT / "routesae").glob("*.py")):
            if module.name in ("__init__.py", "_modidx.py"):
                continue
            found = re.search(r"File to edit: (\S+\.ipynb)", module.read_text())
            if not found or not (module.parent / found[1]).exists():
                yield f"routesae/{module.name}: no notebook {found[1] if found else 'is named in it'}"
        targets = {}
        for nb in notebooks():
            for name in re.findall(r'"#\|\s*default_exp\s+([\w.]+)', nb.read_text()):
                targets.setdefault(name, []).append(nb.name)
        yield from (f"{name}: exported by {', '.join(nbs)}" for name, nbs in targets.items() if len(nbs) > 1)
        listed = set(re.findall(r"[\w/]+\.ipynb", (ROOT / "nbs" / "sidebar.yml").read_text()))
        have = {p.relative_to(ROOT / "nbs").as_posix() for p in notebooks()}
        yield from (f"nbs/{name}: not in nbs/sidebar.yml" for name in sorted(have - listed))
        yield from (f"nbs/sidebar.yml: no notebook {name}" for name in sorted(listed - have))

    fail_if(lines())


MACHINE = re.compile(r"(?<![\w.])(/root|/home/\w|/Users/\w|/tmp/|/work\b|/var/folders|[A-Z]:\\\\Users)")


def check_notebooks(tree):
    "No error outputs, no widgets, no paths of somebody's machine, no notebook of 500 KB."
    def lines():
        for nb in notebooks():
            name, text = nb.relative_to(ROOT), nb.read_text(encoding="utf-8")
            if len(text.encode()) >= MAX_NOTEBOOK_BYTES:
                yield f"{name}: {len(text.encode()) // 1000} KB"
            for i, cell in enumerate(json.loads(text)["cells"]):
                for out in cell.get("outputs", []):
                    where = f"{name}, cell {i}"
                    if out["output_type"] == "error":
                        yield f"{where}: an error output, {out.get('ename')}"
                    if any("widget" in kind for kind in out.get("data", {})):
                        yield f"{where}: a widget output"
                    said = "".join(out.get("text", [])) + "".join("".join(v) for k, v in out.get("data", {}).items() if k.startswith("text/"))
                    if found := MACHINE.search(said):
                        yield f"{where}: the output shows a path of one machine: {said[max(0, found.start() - 30):found.end() + 40]!r}"
                    if out.get("name") == "stderr":
                        yield f"{where}: an output on stderr: {said[:120]!r}"

    fail_if(lines())


def check_help(tree):
    "`make help` names every target, and the console script is installed under the name that the README uses."
    from importlib.metadata import entry_points

    fail_if([] if [e for e in entry_points(group="console_scripts") if e.name == "routesae"] else ["no console script `routesae` is installed"])
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    said = sh(ROOT, "make", "--no-print-directory", "help", MAKEFLAGS="") if shutil.which("make") else " ".join(phony)
    fail_if(f"make help does not list {target}" for target in phony if not re.search(rf"^\s*{target}\b|\b{target}\b", said, re.M))


def check_imports(tree):
    "Every name that `routesae` offers is there, and all of them together cost less than 0.5 s beyond importing torch."
    code = ("import time, torch; t = time.perf_counter(); import routesae; a = time.perf_counter() - t\n"
            "names = [n for n in routesae.__all__ if getattr(routesae, n) is None]; b = time.perf_counter() - t\n"
            "assert not names and set(routesae.__all__) <= set(dir(routesae)); print(a, b)")
    sh(tree, sys.executable, "-c", code)  # the first run writes the byte code
    runs = [[float(x) for x in sh(tree, sys.executable, "-c", code).split()] for _ in range(3)]
    alone, with_names = (statistics.median(col) for col in zip(*runs))
    fail_if([f"import routesae: {alone:.2f} s, with every public name {with_names:.2f} s beyond torch; the limit is 0.5 s"] if with_names >= 0.5 else [])
    return f"import {alone * 1000:.0f} ms, with every public name {with_names * 1000:.0f} ms"


def check_cli_help(tree):
    "`routesae --help` answers within 2 s and lists every command; a wrong command exits 2."
    def once():
        start = time.perf_counter()
        said = sh(tree, BIN / "routesae", "--help")
        return time.perf_counter() - start, said

    once()
    times = [once() for _ in range(3)]
    seconds = statistics.median(t for t, _ in times)
    fail_if(f"routesae --help does not name {c}" for c in ("fetch", "train", "evaluate", "trace") if c not in times[0][1])
    fail_if([f"routesae --help: {seconds:.2f} s; the limit is 2 s"] if seconds >= 2 else [])
    wrong = subprocess.run([BIN / "routesae", "trian"], cwd=tree, env=environment(tree), capture_output=True, text=True)
    fail_if([f"routesae trian: exit {wrong.returncode}, wanted 2\n{wrong.stderr}"] if wrong.returncode != 2 else [])
    return f"{seconds:.2f} s"


def check_docs(tree):
    "The site builds, every internal link leads somewhere, no page loads anything from the network, no equation is left as TeX."
    return sh(tree, sys.executable, ".ci/docs.py").strip().splitlines()[-1].removeprefix("docs: ").partition(";")[0]


def check_figures(tree):
    "After the notebooks of nbs/paper ran, the figures are the committed ones, byte by byte."
    fail_if(differing(ROOT / "figures", tree / "figures", "**/*.svg"))


# ---------------------------------------------------------------- notebooks

RUN = """
import sys
from pathlib import Path
from nbdev.config import get_config
from nbdev.test import test_nb
ok, _ = test_nb(Path(sys.argv[1]).resolve(), skip_flags=get_config().tst_flags.split(), force_flags=sys.argv[2:], basepath=get_config().config_path)
sys.exit(not ok)
"""


def run_notebook(tree, path, flags=()):
    "All cells of one notebook, from top to bottom in a fresh process, by nbdev's own runner."
    sh(tree, sys.executable, "-c", RUN, path, *flags, timeout=900)


# ---------------------------------------------------------------- the demo, small, end to end

SMALL = ["--preset", "demo", "--n-tokens", "8192", "--data.n-ctx", "128", "--batch-size", "4", "--coder.d-sae", "512", "--checkpoint-every", "4"]


def weights(run):
    return {p.relative_to(run): p.read_bytes() for p in sorted(run.rglob("*.safetensors")) if "training" not in p.relative_to(run).parts}


def check_resume(tree):
    "Train on the demo's model and text; kill -9 in the middle; the same command again ends in the same weights, bit for bit; evaluate."
    whole, cut = tree.parent / "runs" / "whole", tree.parent / "runs" / "cut"
    sh(tree, BIN / "routesae", "train", *SMALL, "--out", whole)
    env = environment(tree)
    command = [BIN / "routesae", "train", *SMALL, "--out", cut]
    with open(tree.parent / "cut.log", "w") as log:
        running = subprocess.Popen(command, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        give_up = time.time() + 300
        while running.poll() is None and time.time() < give_up and not list(cut.glob("training/*/checkpoint")):
            time.sleep(0.05)
        time.sleep(0.5)  # into the steps after the checkpoint
        running.send_signal(signal.SIGKILL)
        code = running.wait()
    fail_if([f"the run ended (exit {code}) before it could be killed\n{(tree.parent / 'cut.log').read_text()}"] if code != -signal.SIGKILL else [])
    fail_if(["the killed run had left finished coders"] if weights(cut) else [])
    sh(tree, *command)
    a, b = weights(whole), weights(cut)
    fail_if([f"the unbroken run has no weights in {whole.name}"] if not a else [])
    fail_if([f"weights {sorted(map(str, a))} and {sorted(map(str, b))}"] if a.keys() != b.keys() else [])
    fail_if(f"{name}: not the same bytes after kill and resume" for name in a if a[name] != b[name])

    again = time.perf_counter()
    sh(tree, *command)
    again = time.perf_counter() - again
    sh(tree, BIN / "routesae", "evaluate", cut, "--n-tokens", "2048")
    rows = (cut / "results.csv").read_text().strip().splitlines()
    header = rows[0].split(",")
    methods = {row.split(",")[header.index("method")] for row in rows[1:]}
    fail_if([f"results.csv has the methods {sorted(methods)}"] if not {"topk", "routesae"} <= methods else [])
    return f"{len(a)} coders equal after kill -9; a finished run answers in {again:.1f} s"


# ---------------------------------------------------------------- the runner

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="the checks whose name contains one of these words")
    parser.add_argument("--list", action="store_true", help="print the names of the checks")
    parser.add_argument("--run", nargs="+", metavar="PATH", help="only run these notebooks (files or folders), in the working tree")
    parser.add_argument("--flags", nargs="*", default=[], help="run the cells with these flags too, such as cuda or network")
    args = parser.parse_args()
    print_lock, counts = threading.Lock(), {True: 0, False: 0}

    def step(name, fn):
        start = time.perf_counter()
        try:
            said, ok = fn() or "", True
        except Failed as error:
            said, ok = str(error), False
        except subprocess.TimeoutExpired as error:
            said, ok = f"no answer within {error.timeout:.0f} s\n{(error.output or b'').decode(errors='replace') if isinstance(error.output, bytes) else error.output or ''}", False
        except Exception as error:
            said, ok = f"{type(error).__name__}: {error}", False
        seconds = time.perf_counter() - start
        with print_lock:
            counts[ok] += 1
            print(f"{'ok    ' if ok else 'FAILED'} {name:<34} {seconds:6.1f} s" + (f"  {said}" if ok and said else ""), flush=True)
            if not ok:
                print("\n".join("       | " + line for line in said.rstrip().splitlines()[-40:]), flush=True)
        return ok

    if args.run:
        here = lambda p: sorted(p.rglob("*.ipynb")) if p.is_dir() else [p]
        for path in [nb for arg in args.run for nb in here(Path(arg).resolve()) if ".ipynb_checkpoints" not in nb.parts]:
            step(str(path.relative_to(ROOT)), lambda path=path: run_notebook(ROOT, path, args.flags))
    else:
        with tempfile.TemporaryDirectory(prefix="routesae-check-") as folder:
            tree = copy_tree(Path(folder) / "tree")
            run_all(tree, step, args)
    print(f"{counts[True]} passed, {counts[False]} failed")
    sys.exit(1 if counts[False] or not counts[True] else 0)


def run_all(tree, step, args):
    fetch = lambda: sh(tree, BIN / "routesae", "fetch", timeout=900).strip().splitlines()[-1][:90]
    before = [("versions", check_versions), ("export", check_export), ("clean", check_clean), ("readme", check_readme), ("orphans", check_orphans),
              ("notebooks-tidy", check_notebooks), ("make-help", check_help), ("imports", check_imports), ("cli-help", check_cli_help)]
    nbs = notebooks(tree)
    modules = [p for p in nbs if p.parent.name == "nbs"]
    rest = [p for p in nbs if p.parent.name != "nbs"]
    name = lambda p: p.relative_to(tree).as_posix()
    after = [("docs", check_docs), ("figures", check_figures), ("resume", check_resume)]
    if args.list:
        return print("\n".join([n for n, _ in before] + ["fetch"] + [name(p) for p in modules + rest] + ["modules-time"] + [n for n, _ in after]))
    chosen = lambda n: not args.only or any(word in n for word in args.only)

    for label, check in before:
        if chosen(label):
            step(label, lambda: check(tree))
    if any(chosen(n) for n in ["fetch", "resume", *map(name, nbs)]):
        step("fetch", fetch)
    start = time.perf_counter()
    run = lambda p: step(name(p), lambda: run_notebook(tree, p, args.flags))
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(run, [p for p in modules if chosen(name(p))]))
    seconds = time.perf_counter() - start
    if not args.only:
        def in_time():
            fail_if([f"{seconds:.0f} s; {MODULE_BUDGET_S} s is the target on two cores, twice that the limit"] if seconds > 2 * MODULE_BUDGET_S else [])
            return f"{len(modules)} module notebooks in {seconds:.0f} s; the target is {MODULE_BUDGET_S} s"

        step("modules-time", in_time)
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(run, [p for p in rest if chosen(name(p))]))
    for label, check in after:
        if chosen(label):
            if label == "figures" and args.only:
                for p in rest:
                    if p.parent.name == "paper" and not chosen(name(p)):
                        run_notebook(tree, p)
            step(label, lambda: check(tree))


if __name__ == "__main__":
    main()
