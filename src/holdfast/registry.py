"""Plug-ins by name: one Registry class, one instance for each kind of plug-in.

A plug-in is registered by a decorator in its own file, or lazily by the name of its module, so that
listing plug-ins and checking a config need not import JAX. A plug-in may bring a config class whose
fields then appear in every job's configuration.
"""

import difflib
import hashlib
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from holdfast.errors import UserError, shortened

T = TypeVar("T")

ENTRY_POINT_GROUP = "holdfast.plugins"
PLUGIN_HINT = "one of a plug-in of yours needs `holdfast --plugin MODULE …`"


@dataclass
class _Entry:
    target: Any  # the plug-in itself, or "module:attribute" until it is first asked for
    config: type | None
    help: str


class Registry(Generic[T]):
    """Plug-ins of one kind, by name.

    >>> fruits: Registry[type] = Registry("fruit")
    >>> @fruits.register("apple", help="round")
    ... class Apple: ...
    >>> fruits.get("apple") is Apple
    True
    """

    def __init__(self, kind: str, modules: tuple[str, ...] = ()) -> None:
        """Args:
        kind: the singular noun used in messages.
        modules: modules whose import registers the built-in plug-ins of this kind.
        """
        self.kind = kind
        self._modules = modules
        self._loaded = False
        self._entries: dict[str, _Entry] = {}

    def register(self, name: str, *, config: type | None = None, help: str = "") -> Callable[[T], T]:
        """Decorator that registers a plug-in; a name that is taken raises ValueError."""

        def add(target: T) -> T:
            self._add(name, _Entry(target, config, help))
            return target

        return add

    def lazy(self, name: str, target: str, *, config: type | None = None, help: str = "") -> None:
        """Register `module:attribute`, imported when first asked for."""
        self._add(name, _Entry(target, config, help))

    def _add(self, name: str, entry: _Entry) -> None:
        if name in self._entries:
            raise ValueError(f"the {self.kind} {name!r} is registered already")
        self._entries[name] = entry

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True  # before the imports: what they register may ask for what is there already
        try:
            for module in self._modules:
                importlib.import_module(module)
        except BaseException:
            self._loaded = False  # or the next question would be answered from half a registry
            raise

    def get(self, name: str, *, path: str = "") -> T:
        """The plug-in of that name; `path` is the config path to name when there is none."""
        entry = self._entry(name, path)
        if isinstance(entry.target, str):
            module, _, attribute = entry.target.partition(":")
            entry.target = getattr(importlib.import_module(module), attribute)
        plugin: T = entry.target
        return plugin

    def is_built_in(self, name: str) -> bool:
        """Whether a plug-in is one of ours, whose module need not be imported to know what it declares."""
        target = self._entry(name, "").target
        module = target if isinstance(target, str) else getattr(target, "__module__", "")
        return str(module).startswith("holdfast.")

    def config(self, name: str) -> type | None:
        """The config class that a plug-in brought along, if any."""
        return self._entry(name, "").config

    def help(self, name: str) -> str:
        """The plug-in's one-line description."""
        return self._entry(name, "").help

    def configs(self) -> list[type]:
        """The config classes of all plug-ins, each once, in the order of registration."""
        self._load()
        return list(dict.fromkeys(e.config for e in self._entries.values() if e.config is not None))

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._load()
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _entry(self, name: str, path: str) -> _Entry:
        self._load()
        if name not in self._entries:
            known = {each.lower(): each for each in self._entries}
            near = difflib.get_close_matches(name[:100].lower(), known, n=1)
            hint = f"did you mean {known[near[0]]!r}? " if near else ""
            where = f"{path}: " if path else ""
            raise UserError(
                f"{where}there is no {self.kind} {shortened(name)}; {hint}known: {', '.join(self.names()) or 'none'}; "
                f"{PLUGIN_HINT}"
            )
        return self._entries[name]


jobs: Registry[Any] = Registry("job", ("holdfast.training.config",))
models: Registry[Any] = Registry("model", ("holdfast.models.presets",))
families: Registry[Any] = Registry(
    "model family", ("holdfast.models.family", "holdfast.models.moe", "holdfast.models.hybrid")
)
datasets: Registry[Any] = Registry("dataset", ("holdfast.data.sources",))
evaluations: Registry[Any] = Registry("evaluation", ("holdfast.evaluation.tasks",))
optimizers: Registry[Any] = Registry("optimizer", ("holdfast.optim.optimizers",))
schedules: Registry[Any] = Registry("schedule", ("holdfast.optim.schedules",))
penalties: Registry[Any] = Registry("penalty", ("holdfast.methods",))
methods: Registry[Any] = Registry("method", ("holdfast.methods",))
probes: Registry[Any] = Registry("probe", ("holdfast.training.config",))
trackers: Registry[Any] = Registry("tracker", ("holdfast.tracking.sinks",))

KINDS: dict[str, Registry[Any]] = {
    "jobs": jobs,
    "models": models,
    "families": families,
    "datasets": datasets,
    "evaluations": evaluations,
    "optimizers": optimizers,
    "schedules": schedules,
    "penalties": penalties,
    "methods": methods,
    "probes": probes,
    "trackers": trackers,
}


_plugins: set[str] = set()  # modules of the user that were imported


def load_plugins(modules: list[str]) -> None:
    """Import the user's plug-ins: installed entry points, then the modules named on the command line."""
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        entry_point.load()
        _plugins.add(entry_point.module)
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise UserError(f"--plugin {module}: not the dotted name of a module, such as my_package.my_datasets")
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
                raise UserError(
                    f"--plugin {module}: no such module; give the dotted name of an installed module or of one "
                    "in the current folder (PYTHONPATH=.)"
                ) from error
            raise
        _plugins.add(module)


def plugin_digests() -> dict[str, str]:
    """The user's plug-ins that were imported, each with a digest of its source, so that two hosts can compare them."""
    digests = {}
    for name in sorted(_plugins):
        path = getattr(sys.modules.get(name), "__file__", None)
        digests[name] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""
    return digests
