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

    # whether the code in any head's folder may be run, as `eagle --trust-code` asks
    trusts_heads = False

    def find(self, kind: str) -> type[Any] | None:
        """Return the method of a name or of `PATH.py:CLASS`, relative to the working directory; None if unknown.

        This is for what a user says, in a recipe, an option or a call. What a head's folder says goes to `admit`.
        """
        spelled = SPELLED.fullmatch(kind)
        if kind in self or spelled is None:
            return self.find_named(kind)
        place = spelled["place"]
        module = load_place(place)
        return self.register(class_in(module, spelled["name"], place), place)

    def find_named(self, kind: str, folder: Path | None = None) -> type[Any] | None:
        """Return the method of a name: this package's, or an installed one's outside of `folder`; None if unknown."""
        if kind in self:
            return self[kind]
        # a package in a head's folder, which may be on Python's path, would run code that nobody has trusted
        offers = {
            point
            for point in entry_points(group=GROUP)
            if point.name == kind and not _lies_in(point, folder)
        }
        if len(offers) > 1:
            packages = " and ".join(sorted(_package_of(point) for point in offers))
            raise ValueError(
                f"{packages} both offer a method {kind!r}: uninstall one, or name MODULE:CLASS"
            )
        return self._register_offer(offers.pop()) if offers else None

    def registered_name(self, kind: str) -> str:
        """Return the name that a kind is registered by, which is another one for `PATH.py:CLASS`."""
        method = self.find(kind)
        return kind if method is None or kind in self else name_of(method, kind)

    def offered(self) -> list[str]:
        """Return the names that installed packages offer, of which nothing is loaded."""
        return sorted({point.name for point in entry_points(group=GROUP)} - self.keys())

    def register(self, method: Any, place: str) -> type[Any]:
        """Register a class under its own name; one that belongs to another method is refused."""
        name = name_of(method, place)
        registered = self.get(name)
        # a file that was edited in between brings a new class of the same method
        if registered is None or _file_of(registered) == _file_of(method) is not None:
            self[name] = method
        elif registered is not method:
            owner = _file_of(registered) or f"{registered.__module__}.{registered.__name__}"
            raise ValueError(
                f"{place}: {method.__name__} is called {name!r}, as {owner} is already: give it another name, in the "
                "`kind` of its Settings, or of the class where it has no weights"
            )
        return self[name]

    def load_plugin(self, path: str | Path) -> list[str]:
        """Register every method that a file defines, and return their names."""
        methods = _methods_in(load_file(Path(path)))
        if not methods:
            raise ValueError(
                f"{path} defines no method: expected a class that inherits from Drafter, {ADVICE}"
            )
        return [name_of(self.register(method, str(path)), str(path)) for method in methods.values()]

    def admit(self, folder: Path, config: dict[str, Any], *, trust_code: bool) -> None:
        """Register the method that a head's config names, if it can be: the one gate for code that a folder names.

        The config may name a method of this package or of an installed one. The file of a method in the head's folder
        is run only where it is trusted. No place of code is taken from a config, trusted or not.
        """
        source = folder / "config.json"
        kind = config["settings"].get("kind")
        code = config.get("code")
        # a name like PATH.py:CLASS would run that code
        if isinstance(kind, str) and SPELLED.fullmatch(kind):
            raise ValueError(
                f"{source}: settings.kind is {kind!r:.200}, which names code to run; expected the name of a method, as "
                "save_head writes it. Read that code first, then name it yourself with --plugin PATH.py, and write the "
                "name of its method there"
            )
        known = self.find_named(kind, folder) if isinstance(kind, str) else None
        if code is None:
            return
        if (
            not isinstance(code, dict)
            or not all(isinstance(value, str) for value in code.values())
            or kind is None
        ):
            raise ValueError(
                f"{source}: code is {code!r:.200}, expected what save_head writes; copy the file again"
            )
        # a method of an installed package has no file in the folder
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
            _compare(known, text, folder, str(kind))
            return
        if not (trust_code or self.trusts_heads):
            raise UntrustedCode(
                f"{folder} would run code of its own: {METHOD_FILE} there, which is the class {code.get('class')} of "
                f"{code.get('file')}. Read it first, then trust it with --trust-code (in Python trust_code=True), or "
                f"name the same file yourself, with --plugin or drafter.kind=PATH.py:{code.get('class')}"
            )
        # from here on the code is trusted, and runs
        path = folder / METHOD_FILE
        module = _run(text, path)
        module.__dict__["__head__"] = str(folder)
        method = class_in(module, code.get("class", ""), str(path))
        name = name_of(method, str(path))
        if name != kind:
            raise ValueError(
                f"{source} names the method {kind!r}, and {METHOD_FILE} beside it has {name!r}"
            )
        self.register(method, str(path))

    def _register_offer(self, point: EntryPoint) -> type[Any]:
        """Register the method that an installed package offers."""
        place = f"the package {_package_of(point)}, which offers {point.name!r} as {point.value}"
        try:
            method = point.load()
        except Exception as error:  # whatever the package runs into
            raise ValueError(
                f"{place}, cannot be loaded: {error!r:.300}. Install it again, or ask its makers"
            ) from None
        name = name_of(method, place)
        if name != point.name:
            raise ValueError(
                f"{place}: that method is called {name!r}; its makers give the entry point the same name"
            )
        return self.register(method, place)


ADVICE = (
    "and where it has weights from TrainableDrafter, with Settings that have a kind of their own"
)


def _compare(known: type[Any], text: bytes, folder: Path, kind: str) -> None:
    """Warn, or refuse, where the method that is loaded is not the one that a head was saved with."""
    module = sys.modules.get(known.__module__)
    # a method of a package has no text, and is taken as it is
    loaded = getattr(module, "__code_text__", text)
    if loaded == text:
        return
    head = getattr(module, "__head__", None)
    if head:
        raise ValueError(
            f"{folder} and {head} hold different code of the method {kind!r}: one process loads one of them"
        )
    warnings.warn(
        f"{folder} was saved with other code of {kind!r} than {_file_of(known)}: the file that you named is used",
        stacklevel=2,
    )


def load_place(place: str) -> ModuleType:
    """Return the module of a file, or of a dotted name."""
    if place.endswith(".py"):
        return load_file(Path(place))
    try:
        return import_module(place)
    except ImportError as error:
        raise ValueError(
            f"{place} is no module that can be imported: {error}; expected {EXPECTED}"
        ) from None


def load_file(path: Path) -> ModuleType:
    """Run a file as a module; the same text is run once in a process, wherever it is."""
    path = path.expanduser()
    if not path.is_file():
        raise ValueError(f"no file at {path}, looked for from {Path.cwd()}: expected {EXPECTED}")
    return _run(path.read_bytes(), path)


def _run(text: bytes, path: Path) -> ModuleType:
    """Return the module of a file's text; an error in it is reported with its line."""
    # its name is the same in every process, so that what one pickles another reads
    name = f"outside_{checksum(text)[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path.resolve())
    # what is saved beside a head, whatever the file becomes
    module.__dict__["__code_text__"] = text
    # dataclasses and pydantic look for annotations there
    sys.modules[name] = module
    try:
        exec(compile(text, module.__file__, "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        lines = [
            frame.lineno
            for frame in extract_tb(error.__traceback__)
            if frame.filename == module.__file__
        ]
        if isinstance(error, SyntaxError):
            lines = [error.lineno]
        line = lines[-1] if lines else "?"
        hint = f" ({ONE_FILE})" if isinstance(error, ModuleNotFoundError) else ""
        raise ValueError(f"{path}, line {line}: {type(error).__name__}: {error}{hint}") from error
    return module


def class_in(module: ModuleType, name: str, place: str) -> Any:
    """Return the class of a name; the methods that are there are named where it is missing."""
    found = getattr(module, name, None)
    if found is not None:
        return found
    names = list(_methods_in(module))
    raise ValueError(
        f"{place} has no {name}{nearest(name, names)}: expected one of {', '.join(names) or 'its classes'}"
    )


def _methods_in(module: ModuleType) -> dict[str, type[Any]]:
    """Return the methods that a module defines, by name; bases of methods are none."""
    methods = {}
    for name, value in vars(module).items():
        is_drafter = (
            isinstance(value, type)
            and issubclass(value, Drafter)
            and value.__module__ == module.__name__
        )
        if not is_drafter or value.__name__.startswith("_"):
            continue
        if not issubclass(value, TrainableDrafter) or hasattr(value, "Settings"):
            methods[name] = value
    return methods


def name_of(method: Any, place: str) -> str:
    """Return a method's name in recipes: the `kind` of its Settings; without weights its own, or the class's name."""
    if not isinstance(method, type) or not issubclass(method, Drafter):
        what = getattr(method, "__name__", repr(method)[:80])
        raise ValueError(
            f"{place}: {what} is no Drafter: expected a class that inherits from Drafter, {ADVICE}"
        )
    if not issubclass(method, TrainableDrafter):
        kind: Any = getattr(method, "kind", method.__name__)
    else:
        fields = getattr(getattr(method, "Settings", None), "model_fields", {})
        kind = fields["kind"].default if "kind" in fields else None
    is_word = (
        isinstance(kind, str)
        and kind
        and not SPELLED.fullmatch(kind)
        and not {",", "/"} & set(kind)
    )
    if not is_word:
        raise ValueError(
            f"{place}: {method.__name__} has the name {kind!r}, expected a word: write a class Settings(Section) with "
            'kind: Literal["mymethod"] = "mymethod"'
        )
    return kind


def describe_code(method: type[Any]) -> dict[str, str] | None:
    """Return where a method comes from: a file with its checksum, or an installed package; None for this package's."""
    module = sys.modules.get(method.__module__)
    text = getattr(module, "__code_text__", None)
    if text:
        name = Path(str(getattr(module, "__file__", METHOD_FILE))).name
        return {"file": name, "class": method.__name__, "sha256": checksum(text)}
    top = method.__module__.split(".")[0]
    if top == __name__.split(".")[0]:
        return None
    package = _find_package(top)
    return (
        None
        if package is None
        else {"module": method.__module__, "class": method.__name__, "package": package}
    )


@cache
def _find_package(module: str) -> str | None:
    """Return the installed package that brings a module, and its version; the search reads all that is installed."""
    packages = packages_distributions().get(module)
    return f"{packages[0]} {version(packages[0])}" if packages else None


def code_text(method: type[Any]) -> bytes | None:
    """Return the text of the file that a method was read from; None where it is installed or this package's."""
    return getattr(sys.modules.get(method.__module__), "__code_text__", None)


def checksum(text: bytes) -> str:
    """Return the SHA-256 of a file's text."""
    return hashlib.sha256(text).hexdigest()


def _read_code(folder: Path, code: dict[str, str]) -> bytes:
    """Return the code in a head's folder, which must be what was saved."""
    path = folder / METHOD_FILE
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, which holds the head's method: copy the whole folder again"
        )
    text = path.read_bytes()
    if checksum(text) != code["sha256"]:
        raise ValueError(
            f"{path} was altered after the head was saved: its SHA-256 is {checksum(text)[:16]}..., expected "
            f"{code['sha256'][:16]}... by config.json. Copy the folder again from where you trust it"
        )
    return text


def _file_of(method: type[Any]) -> str | None:
    """Return the file that a method was read from by this module."""
    module = sys.modules.get(method.__module__)
    return getattr(module, "__file__", None) if hasattr(module, "__code_text__") else None


def _lies_in(point: EntryPoint, folder: Path | None) -> bool:
    """Return whether the package of an entry point is in a folder."""
    if folder is None or point.dist is None:
        return False
    return Path(str(point.dist.locate_file(""))).resolve().is_relative_to(folder.resolve())


def _package_of(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
