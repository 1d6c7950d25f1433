"""Methods that are not the package's own: from a file, a module, an installed package, or the folder of a head."""

from __future__ import annotations

import hashlib
import re
import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from eagle.core.arguments import nearest
from eagle.core.drafter import Drafter, TrainableDrafter

GROUP = "eagle.drafters"  # the entry points by which an installed package offers methods
SPELLED = re.compile(r"(?P<place>.+):(?P<name>[A-Za-z_]\w*)")
METHOD_FILE = "method.py"  # in a head's folder, the file that its class was read from
EXPECTED = "a name, PATH.py:CLASS, or MODULE:CLASS of an installed package"
ONE_FILE = "a method of several files is an installed package with an entry point: docs/guides/own-method.md"


class UntrustedCode(ValueError):
    """A head's folder holds the code of its method, which nobody has trusted."""


class Methods(dict[str, type[Any]]):
    """Methods by name; `find` loads and registers those that the package does not know."""

    trusts_heads = False  # whether the code in any head's folder may be run, as `eagle --trust-code` asks

    def find(self, kind: str) -> type[Any] | None:
        """The method of a name or of `PATH.py:CLASS`, a path being relative to the working directory; None if unknown.

        This is for what a user says, in a recipe, an option or a call. What a head's folder says goes to `admit`.
        """
        if kind not in self and (spelled := SPELLED.fullmatch(kind)):
            module = load_place(spelled["place"])
            return self.register(class_in(module, spelled["name"], spelled["place"]), spelled["place"])
        return self.find_named(kind)

    def find_named(self, kind: str, folder: Path | None = None) -> type[Any] | None:
        """The method of a name: the package's own, else that of an installed package outside a folder; else None."""
        if kind in self:
            return self[kind]
        offers = {point for point in entry_points(group=GROUP) if point.name == kind and not _lies_in(point, folder)}
        if len(offers) > 1:
            packages = " and ".join(sorted(map(_package_of, offers)))
            raise ValueError(f"{packages} both offer a method {kind!r}: uninstall one, or name MODULE:CLASS")
        return self._take_in(offers.pop()) if offers else None

    def registered_name(self, kind: str) -> str:
        """The name that a kind is registered by, which is another one for `PATH.py:CLASS`."""
        method = self.find(kind)
        return kind if method is None or kind in self else name_of(method, kind)

    def offered(self) -> list[str]:
        """The names that installed packages offer, of which nothing is loaded."""
        return sorted({point.name for point in entry_points(group=GROUP)} - self.keys())

    def register(self, method: Any, place: str) -> type[Any]:
        """Register a class under its own name; one that belongs to another method is refused."""
        name = name_of(method, place)
        known = self.get(name)
        if known is None or _file_of(known) == _file_of(method) is not None:  # a file that was edited in between
            self[name] = method
        elif known is not method:
            owner = _file_of(known) or f"{known.__module__}.{known.__name__}"
            raise ValueError(
                f"{place}: {method.__name__} is called {name!r}, as {owner} is already: give it another name, in the "
                "`kind` of its Settings, or of the class where it has no weights"
            )
        return self[name]

    def load_plugin(self, path: str | Path) -> list[str]:
        """Register every method that a file defines; their names."""
        module = load_file(Path(path))
        found = [value for value in vars(module).values() if _is_method(value) and value.__module__ == module.__name__]
        if not found:
            raise ValueError(f"{path} defines no method: expected a class that inherits from Drafter, {ADVICE}")
        return [name_of(self.register(method, str(path)), str(path)) for method in found]

    def admit(self, folder: Path, config: dict[str, Any], *, trust_code: bool) -> None:
        """Register the method that a head's config names, if it can be: the one gate for code that a folder names.

        The config may name a method of this package or of an installed one. The file of a method in the head's folder
        is run only where it is trusted. No place of code is taken from a config, trusted or not.
        """
        source, kind, code = folder / "config.json", config["settings"].get("kind"), config.get("code")
        if isinstance(kind, str) and SPELLED.fullmatch(kind):
            raise ValueError(
                f"{source}: settings.kind is {kind!r:.200}, which names code to run; expected the name of a method, as "
                "save_head writes it. Read that code first, then name it yourself with --plugin PATH.py, and write the "
                "name of its method there"
            )
        known = self.find_named(kind, folder) if isinstance(kind, str) else None
        if code is None:
            return
        if not isinstance(code, dict) or not all(isinstance(value, str) for value in code.values()) or kind is None:
            raise ValueError(f"{source}: code is {code!r:.200}, expected what save_head writes; copy the file again")
        if "sha256" not in code:
            if known is None:
                named = f"{code.get('module')}:{code.get('class')}"
                raise ValueError(
                    f"{source}: the method {kind!r} is {named} of the package {code.get('package')}, which does not "
                    f"offer it here: install that package, or name drafter.kind={named}"
                )
            return
        text = _read_code(folder, code)
        if known is not None:
            self._compare(known, text, folder, str(kind))
            return
        if not (trust_code or self.trusts_heads):
            raise UntrustedCode(
                f"{folder} would run code of its own: {METHOD_FILE} there, which is the class {code.get('class')} of "
                f"{code.get('file')}. Read it first, then trust it with --trust-code (in Python trust_code=True), or "
                f"name the same file yourself, with --plugin or drafter.kind=PATH.py:{code.get('class')}"
            )
        module = _run(text, folder / METHOD_FILE)
        module.__dict__["__head__"] = str(folder)
        method = class_in(module, code.get("class", ""), str(folder / METHOD_FILE))
        if (name := name_of(method, str(folder / METHOD_FILE))) != kind:
            raise ValueError(f"{source} names the method {kind!r}, and {METHOD_FILE} beside it has {name!r}")
        self.register(method, str(folder / METHOD_FILE))

    def _compare(self, known: type[Any], text: bytes, folder: Path, kind: str) -> None:
        """Take the method that is loaded; tell, or refuse, where it is not the one that the head was saved with."""
        module = sys.modules.get(known.__module__)
        loaded = getattr(module, "__code_text__", text)
        if loaded == text:
            return
        if head := getattr(module, "__head__", None):
            raise ValueError(
                f"{folder} and {head} hold different code of the method {kind!r}: one process loads one of them"
            )
        warnings.warn(
            f"{folder} was saved with other code of {kind!r} than {_file_of(known)}: the file that you named is used",
            stacklevel=2,
        )

    def _take_in(self, point: EntryPoint) -> type[Any]:
        """Register what an installed package offers."""
        place = f"the package {_package_of(point)}, which offers {point.name!r} as {point.value}"
        try:
            method = point.load()
        except Exception as error:  # whatever the package runs into
            raise ValueError(
                f"{place}, cannot be loaded: {error!r:.300}. Install it again, or ask its makers"
            ) from None
        name = name_of(method, place)
        if name != point.name:
            raise ValueError(f"{place}: that method is called {name!r}; its makers give the entry point the same name")
        return self.register(method, place)


ADVICE = "and where it has weights from TrainableDrafter, with Settings that have a kind of their own"


def load_place(place: str) -> ModuleType:
    """The module of a file, or of a dotted name."""
    if place.endswith(".py"):
        return load_file(Path(place))
    try:
        return import_module(place)
    except ImportError as error:
        raise ValueError(f"{place} is no module that can be imported: {error}; expected {EXPECTED}") from None


def load_file(path: Path) -> ModuleType:
    """Run a file as a module; the same text is run once in a process, wherever it lies."""
    path = path.expanduser()
    if not path.is_file():
        raise ValueError(f"no file at {path}, looked for from {Path.cwd()}: expected {EXPECTED}")
    return _run(path.read_bytes(), path)


def _run(text: bytes, path: Path) -> ModuleType:
    """The module of a file's text, which its checksum names; an error in it is told with its line."""
    name = f"outside_{checksum(text)[:16]}"  # the same in every process, so that what pickles there is read here
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path.resolve())
    module.__dict__["__code_text__"] = text  # what is saved beside a head, whatever the file becomes
    sys.modules[name] = module  # where dataclasses and pydantic look for annotations
    try:
        exec(compile(text, module.__file__, "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == module.__file__]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else "?"
        hint = f" ({ONE_FILE})" if isinstance(error, ModuleNotFoundError) else ""
        raise ValueError(f"{path}, line {line}: {type(error).__name__}: {error}{hint}") from error
    return module


def class_in(module: ModuleType, name: str, place: str) -> Any:
    """The class of a name; the methods that are there are named where it is missing."""
    if (found := getattr(module, name, None)) is not None:
        return found
    there = [key for key, value in vars(module).items() if _is_method(value) and value.__module__ == module.__name__]
    raise ValueError(
        f"{place} has no {name}{nearest(name, there)}: expected one of {', '.join(there) or 'its classes'}"
    )


def name_of(method: Any, place: str) -> str:
    """The name that a method has in recipes: the `kind` of its Settings; without weights its `kind`, or the class's."""
    if not isinstance(method, type) or not issubclass(method, Drafter):
        what = getattr(method, "__name__", repr(method)[:80])
        raise ValueError(f"{place}: {what} is no Drafter: expected a class that inherits from Drafter, {ADVICE}")
    if not issubclass(method, TrainableDrafter):
        kind: Any = getattr(method, "kind", method.__name__)
    else:
        fields = getattr(getattr(method, "Settings", None), "model_fields", {})
        kind = fields["kind"].default if "kind" in fields else None
    if not isinstance(kind, str) or SPELLED.fullmatch(kind) or not kind or {",", "/"} & set(kind):
        raise ValueError(
            f"{place}: {method.__name__} has the name {kind!r}, expected a word: write a class Settings(Section) with "
            'kind: Literal["mymethod"] = "mymethod"'
        )
    return kind


def describe_code(method: type[Any]) -> dict[str, str] | None:
    """Where a method comes from: a file with its checksum, or an installed package; None for the package's own."""
    module = sys.modules.get(method.__module__)
    if text := getattr(module, "__code_text__", None):
        name = Path(str(getattr(module, "__file__", METHOD_FILE))).name
        return {"file": name, "class": method.__name__, "sha256": checksum(text)}
    top = method.__module__.split(".")[0]
    if top == __name__.split(".")[0]:
        return None
    package = _find_package(top)
    return None if package is None else {"module": method.__module__, "class": method.__name__, "package": package}


@cache
def _find_package(module: str) -> str | None:
    """The installed package that brings a module, and its version; the search reads all that is installed."""
    packages = packages_distributions().get(module)
    return f"{packages[0]} {version(packages[0])}" if packages else None


def code_text(method: type[Any]) -> bytes | None:
    """The text of the file that a method was read from; None where it is installed or the package's own."""
    return getattr(sys.modules.get(method.__module__), "__code_text__", None)


def checksum(text: bytes) -> str:
    """The SHA-256 of a file's text."""
    return hashlib.sha256(text).hexdigest()


def _read_code(folder: Path, code: dict[str, str]) -> bytes:
    """The text of the code in a head's folder, which must be what was saved."""
    path = folder / METHOD_FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing, which holds the head's method: copy the whole folder again")
    text = path.read_bytes()
    if checksum(text) != code["sha256"]:
        raise ValueError(
            f"{path} was altered after the head was saved: its SHA-256 is {checksum(text)[:16]}..., expected "
            f"{code['sha256'][:16]}... by config.json. Copy the folder again from where you trust it"
        )
    return text


def _is_method(value: Any) -> bool:
    """Whether a class is a method, and no base of methods."""
    if not isinstance(value, type) or not issubclass(value, Drafter) or value.__name__.startswith("_"):
        return False
    return not issubclass(value, TrainableDrafter) or hasattr(value, "Settings")


def _file_of(method: type[Any]) -> str | None:
    """The file that a method was read from by this module."""
    module = sys.modules.get(method.__module__)
    return getattr(module, "__file__", None) if hasattr(module, "__code_text__") else None


def _lies_in(point: EntryPoint, folder: Path | None) -> bool:
    """Whether the package of an entry point lies in a folder, as it may where the folder is on Python's path."""
    if folder is None or point.dist is None:
        return False
    return Path(str(point.dist.locate_file(""))).resolve().is_relative_to(folder.resolve())


def _package_of(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
