"""The documentation is true: its links lead somewhere, its commands exist, its tutorials and plug-ins run."""

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from holdfast.cli.app import app
from holdfast.config import merge
from holdfast.training.config import config_classes

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TUTORIALS = sorted((ROOT / "docs").glob("tutorial-*.md"))
HOWTOS = sorted((ROOT / "docs").glob("howto-*.md"))
PLUGIN_HOWTOS = [page for page in HOWTOS if page.name.startswith("howto-add-")]
RUN_HOWTOS = [page for page in HOWTOS if page.name != "howto-publish.md"]  # test_publish.py has a hub for that one
MINUTES = 20
SHARED = Path(os.environ.get("HOLDFAST_SHARED", ROOT.parent / "shared"))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNS = re.compile(r"^<!-- runs -->\n```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
# What a command line begins with: nothing, variables, or an operator of the shell; then options such as --plugin NAME.
COMMAND = re.compile(r"(?:^|[;&|(]|\b\w+=\S+)\s*(?:\S*/)?holdfast((?:\s+--[\w-]+(?:[ =]\w+)?)*)\s+([a-z]\w*)")


def name(page: Path) -> str:
    return page.name


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands_of(text: str) -> set[str]:
    """The subcommands that a page's shell blocks and its `code` name."""
    shell = [line for kind, block in FENCE.findall(text) if kind == "bash" for line in block.splitlines()]
    inline = CODE.findall(FENCE.sub("", text))
    return {match[2] for line in [*shell, *inline] for match in COMMAND.finditer(line)}


def known_commands() -> set[str]:
    named = {str(command.name) for command in app.registered_commands}
    return named | {str(group.name) for group in app.registered_groups}


def test_commands_are_found_in_text() -> None:
    text = (
        "`holdfast plan X` `$(holdfast a)`\n```bash\nA=1 holdfast --plugin my run x || .venv/bin/holdfast show\n```\n"
    )
    assert commands_of(text) == {"plan", "a", "run", "show"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name}: {target} does not exist"
        assert found.is_relative_to(ROOT), f"{page.name}: {target} leads out of the repository"
        if anchor:
            assert anchor in anchors(found), f"{page.name}: {target}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page: Path) -> None:
    unknown = commands_of(page.read_text(encoding="utf-8")) - known_commands()
    assert not unknown, f"{page.name} names commands that do not exist: {unknown}"


def option_lines(text: str) -> list[tuple[str, list[str]]]:
    """The subcommands of shell blocks and of `code`, each with the options that follow it."""
    shell = [
        line
        for kind, block in FENCE.findall(text)
        if kind == "bash"
        for line in block.replace("\\\n", " ").splitlines()
    ]
    found = []
    for line in [*shell, *CODE.findall(FENCE.sub("", text))]:
        for match in COMMAND.finditer(line):
            words = re.split(r"[;&|#)]", line[match.end() :])[0].split()
            inner = words[0] if match[2] in GROUPS and words else ""
            options = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
            found.append((f"{match[2]} {inner}".strip(), options))
    return found


GROUPS = {str(group.name) for group in app.registered_groups}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_options_exist(page: Path) -> None:
    root: Any = get_command(app)
    for command, options in option_lines(page.read_text(encoding="utf-8")):
        found = root
        for each in command.split():
            found = getattr(found, "commands", {}).get(each, found)
        known = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
        # What `launch` does not know it hands to `run`.
        known |= (
            {name for parameter in root.commands["run"].params for name in parameter.opts}
            if command in ("launch", "submit")
            else set()
        )
        assert set(options) <= {*known, "--help"}, f"{page.name}: holdfast {command}"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HOWTOS], ids=name)
def test_configs_on_pages_are_valid(page: Path) -> None:
    """How-tos run theirs; elsewhere a block is a whole config, or a part of one of the job with most options."""
    for kind, block in FENCE.findall(page.read_text(encoding="utf-8")):
        values = yaml.safe_load(block) if kind == "yaml" else {}
        if values and "apiVersion" not in values and page.name != "verdict.md":
            merge(config_classes(values.pop("job", "continual/train/abcd_kl")), values)


def test_every_page_can_be_reached() -> None:
    linked = {target for page in PAGES for target in LINK.findall(page.read_text(encoding="utf-8"))}
    names = {Path(target.partition("#")[0]).name for target in linked}
    assert {page.name for page in PAGES} - {"README.md"} <= names


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_yaml_can_be_read(page: Path) -> None:
    for kind, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if kind == "yaml":
            assert isinstance(yaml.safe_load(block), dict)


def test_the_manifest_for_kubernetes_is_what_jax_asks_for() -> None:
    """JAX's detection: an Indexed Job whose pods have a headless service as subdomain and may read the job."""
    with (ROOT / "examples" / "kubernetes.yaml").open(encoding="utf-8") as file:
        parts = {part["kind"]: part for part in yaml.safe_load_all(file)}
    job, pod = parts["Job"]["spec"], parts["Job"]["spec"]["template"]["spec"]
    service = parts["Service"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] > 1
    assert pod["restartPolicy"] == "Never"  # what a podFailurePolicy asks for
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": parts["Job"]["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["serviceAccountName"] == parts["ServiceAccount"]["metadata"]["name"]
    assert parts["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": pod["serviceAccountName"]}]
    assert parts["RoleBinding"]["roleRef"]["name"] == parts["Role"]["metadata"]["name"]
    allowed = {name: set(rule["verbs"]) for rule in parts["Role"]["rules"] for name in rule["resources"]}
    assert all(allowed[name] >= {"get", "list"} for name in ("pods", "services", "jobs"))
    (container,) = pod["containers"]
    assert {
        rule["onExitCodes"]["containerName"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    } == {container["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["command"][:2] == ["holdfast", "run"]


def test_the_package_is_described_with_links_that_lead_somewhere_on_an_index() -> None:
    module = runpy.run_path(str(ROOT / "setup.py"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = project["urls"]["Source"]
    assert all(url.startswith("https://") for url in project["urls"].values())
    targets = LINK.findall(module["description"]())
    assert len(targets) > 5
    for target in targets:
        assert target.startswith("https://"), target
        if target.startswith(source):
            inside = target.removeprefix(source).partition("/main/")[2].partition("#")[0]
            assert (ROOT / inside).exists(), target
    assert project["dynamic"] == ["readme"]  # else the text of README.md would be taken as it is


def test_a_version_of_the_changelog_has_each_section_once() -> None:
    versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    order = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for version in versions:
        sections = re.findall(r"^### (.+)$", version, re.MULTILINE)
        assert sections == [each for each in order if each in sections], version.partition("\n")[0]


def use_it() -> str:
    """The commands that README's "Use it" asks to type after the installation."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Use it\n")[2].partition("\n## ")[0]
    install, commands = (block for kind, block in FENCE.findall(section) if kind == "bash")
    assert install.startswith("pip install ")
    return commands


@pytest.mark.slow
def test_a_new_user_gets_to_the_end_of_use_it(tmp_path: Path) -> None:
    printed = run_script(use_it(), tmp_path, root=False)
    assert "Traceback" not in printed
    first = tmp_path / "runs" / "general" / "default" / "first"
    assert json.loads((first / "results.json").read_text())["finished"]
    assert (first / "report.html").is_file()
    assert (tmp_path / "compare.html").is_file()


def run_script(script: str, folder: Path, minutes: float = MINUTES, *, root: bool = True) -> str:
    """Run a shell script from a folder that looks like the root of the repository; returns what it printed.

    Args:
        root: whether it looks so; else the folder is as it is.
    """
    if root:
        (folder / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{script}"],
        cwd=folder,
        env={**os.environ, "XLA_FLAGS": "", "PATH": path, "HOLDFAST_SHARED": str(SHARED)},
        capture_output=True,
        text=True,
        timeout=minutes * 60,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=name)
def test_tutorials_run_as_they_stand(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if "HOLDFAST_SHARED" in text and not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not there")
    blocks = RUNS.findall(text)
    assert blocks
    printed = run_script("\n".join(blocks), tmp_path)
    assert "Traceback" not in printed
    # Where a page shows that something is refused, it must be.
    assert printed.count("refused, exit code 2\n") == sum(block.count('"refused, exit code') for block in blocks)


def plugin_of(page: Path) -> tuple[str, str]:
    """The plug-in that a how-to shows: the name of its file and its text."""
    text = page.read_text(encoding="utf-8")
    (named,) = set(re.findall(r"--plugin (my_\w+)", text))
    (code,) = [block for kind, block in FENCE.findall(text) if kind == "python"]
    assert f"`{named}.py`" in text
    return named, code


@pytest.mark.parametrize("page", PLUGIN_HOWTOS, ids=name)
def test_plugins_register_without_jax(page: Path, tmp_path: Path) -> None:
    named, code = plugin_of(page)
    (tmp_path / f"{named}.py").write_text(code, encoding="utf-8")
    registered = re.findall(r'\.register\("(\w+)"', code)
    assert registered
    check = (
        f"import sys; sys.argv = ['holdfast', '--plugin', '{named}', 'jobs']\n"
        "from holdfast.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'jax' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(each in done.stdout for each in registered)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_HOWTOS, ids=name)
def test_howtos_run_as_they_stand(page: Path, tmp_path: Path) -> None:
    blocks = FENCE.findall(page.read_text(encoding="utf-8"))
    assert any(kind == "bash" for kind, _ in blocks)
    if page in PLUGIN_HOWTOS:
        named, code = plugin_of(page)
        (tmp_path / f"{named}.py").write_text(code, encoding="utf-8")
    for kind, block in blocks:
        if kind == "yaml":
            (tmp_path / "mine.yaml").write_text(block, encoding="utf-8")
    printed = run_script("\n".join(block for kind, block in blocks if kind == "bash"), tmp_path)
    assert "Traceback" not in printed
