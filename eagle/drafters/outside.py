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
# PATH.py:CLASS or MODULE:CLASS
PLACE_AND_CLASS = re.compile(r"(?P<place>.+):(?P<name>[A-Za-z_]\w*)")
METHOD_FILE = "method.py"  # in a head's folder, the file that its class was read from
EXPECTED = "a name, PATH.py:CLASS, or MODULE:CLASS of an installed package"
ONE_FILE = "a method of several files is an installed package with an entry point: docs/guides/own-method.md"


class UntrustedCode(ValueError):
    """A head's folder holds the code of its method, which nobody has trusted."""


class Methods(dict[str, type[Any]]):
    """Drafting methods (classes) by name; `find` loads and registers those that the package does not know."""

    # whether the code in any head's folder may be run, as `eagle --trust-code` asks
    trusts_heads = False

    def find(self, kind: str) -> type[Any] | None:
        """Return the method of a name or of `PATH.py:CLASS`, relative to the working directory; None if unknown.

        It may run code, so it is for names that a user gives, in a recipe, an option or a call. A name that a head's
        folder gives goes to `admit`.
        """
        match = PLACE_AND_CLASS.fullmatch(kind)
        # a plain name
        if kind in self or match is None:
            return self.find_named(kind)
        place = match["place"]
        module = load_place(place)
        return self.register(class_in(module, match["name"], place), place)

    def find_named(self, kind: str, folder: Path | None = None) -> type[Any] | None:
        """Return the method of a name, of this package or offered by an installed one; None if unknown.

        Installed packages inside `folder`, which is a head's, are ignored.
        """
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
        """Return the name by which a method is registered; for `PATH.py:CLASS` it is the method's own name."""
        method = self.find(kind)
        return kind if method is None or kind in self else name_of(method, kind)

    def offered(self) -> list[str]:
        """Return the names of further methods that installed packages offer; the packages are not imported."""
        return sorted({point.name for point in entry_points(group=GROUP)} - self.keys())

    def register(self, method: Any, place: str) -> type[Any]:
        """Register a method's class under its own name and return it; a name that another method has is refused.

        Args:
            method: The class.
            place: Where it is from, for a refusal.
        """
        name = name_of(method, place)
        registered = self.get(name)
        file = _file_of(method)
        # the same file, edited since it was read, brings a new class of the same method
        if registered is None or (file is not None and _file_of(registered) == file):
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
        # what `describe_code` noted of the method's code; None for a method of this package
        code = config.get("code")
        # a name like PATH.py:CLASS would run that code
        if isinstance(kind, str) and PLACE_AND_CLASS.fullmatch(kind):
            raise ValueError(
                f"{source}: settings.kind is {kind!r:.200}, which names code to run; expected the name of a method, as "
                "save_head writes it. Read that code first, then name it yourself with --plugin PATH.py, and write the "
                "name of its method there"
            )
        registered = self.find_named(kind, folder) if isinstance(kind, str) else None
        # a head of this package's methods brings no code
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
            if registered is None:
                named = f"{code.get('module')}:{code.get('class')}"
                raise ValueError(
                    f"{source}: the method {kind!r} is {named} of the package {code.get('package')}, which does not "
                    f"offer it here: install that package, or name drafter.kind={named}"
                )
            return
        # refused if it does not have the checksum of the config
        text = _read_code(folder, code)
        # the class is loaded already, by --plugin, a recipe or another head: the folder's code is not run
        if registered is not None:
            _compare_code(registered, text, folder, str(kind))
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
        # `_compare_code` names the folder if another head has other code
        module.__dict__["__head__"] = str(folder)
        method = class_in(module, code.get("class", ""), str(path))
        name = name_of(method, str(path))
        if name != kind:
            raise ValueError(
                f"{source} names the method {kind!r}, and {METHOD_FILE} beside it has {name!r}"
            )
        self.register(method, str(path))

    def _register_offer(self, point: EntryPoint) -> type[Any]:
        """Import the method that an installed package offers by an entry point, register it, and return it."""
        place = f"the package {_package_of(point)}, which offers {point.name!r} as {point.value}"
        try:
            method = point.load()
        except Exception as error:  # importing a package may raise anything
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


def _compare_code(registered: type[Any], text: bytes, folder: Path, kind: str) -> None:
    """Compare the code of a registered method with the code that a head was saved with.

    Two heads' folders with different code are refused, as one name stands for one class in a process. If the user named
    the file of the method, a warning is enough.

    Args:
        registered: The class that is loaded.
        text: The code in the head's folder.
        folder: The head's folder.
        kind: The method's name.
    """
    module = sys.modules.get(registered.__module__)
    # `_run` sets `__code_text__`, and `admit` sets `__head__`, the head's folder that the code was read from. A method
    # of an installed package has no saved text, and is accepted.
    loaded = getattr(module, "__code_text__", text)
    if loaded == text:
        return
    head = getattr(module, "__head__", None)
    if head:
        raise ValueError(
            f"{folder} and {head} hold different code of the method {kind!r}: one process loads one of them"
        )
    warnings.warn(
        f"{folder} was saved with other code of {kind!r} than {_file_of(registered)}: the file that you named is used",
        stacklevel=2,
    )


def load_place(place: str) -> ModuleType:
    """Return the module of a file or of a dotted name, which is run or imported if it has not been before."""
    if place.endswith(".py"):
        return load_file(Path(place))
    try:
        return import_module(place)
    except ImportError as error:
        raise ValueError(
            f"{place} is no module that can be imported: {error}; expected {EXPECTED}"
        ) from None


def load_file(path: Path) -> ModuleType:
    """Run a file as a module and return it; files with the same text are run once in a process."""
    path = path.expanduser()
    if not path.is_file():
        raise ValueError(f"no file at {path}, looked for from {Path.cwd()}: expected {EXPECTED}")
    return _run(path.read_bytes(), path)


def _run(text: bytes, path: Path) -> ModuleType:
    """Run a file's text as a module, once in a process, and return it; report an error in it with its line."""
    # the name is made of the text, so that an object pickled in one process can be read in another
    name = f"outside_{checksum(text)[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path.resolve())
    # this text is saved beside a head, even if the file is changed later
    module.__dict__["__code_text__"] = text
    # registered before it runs, as dataclasses and pydantic look annotations up in sys.modules
    sys.modules[name] = module
    try:
        exec(compile(text, module.__file__, "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        # of the calls that led to the error, the lines in this file; a syntax error has none
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
    """Return a module's class of this name; if it is missing, the refusal lists the methods that the module has.

    `place` says where the module is from, for the refusal.
    """
    found = getattr(module, name, None)
    if found is not None:
        return found
    names = list(_methods_in(module))
    raise ValueError(
        f"{place} has no {name}{nearest(name, names)}: expected one of {', '.join(names) or 'its classes'}"
    )


def _methods_in(module: ModuleType) -> dict[str, type[Any]]:
    """Return the drafting methods that a module defines, by class name; abstract bases and imports are left out."""
    methods = {}
    for name, value in vars(module).items():
        is_drafter = (
            isinstance(value, type)
            and issubclass(value, Drafter)
            and value.__module__ == module.__name__
        )
        # a private class is a helper or a base
        if not is_drafter or value.__name__.startswith("_"):
            continue
        # a trainable class without Settings is a base of methods
        if not issubclass(value, TrainableDrafter) or hasattr(value, "Settings"):
            methods[name] = value
    return methods


def name_of(method: Any, place: str) -> str:
    """Return a method's name in recipes: the `kind` of its Settings; without weights of the class, or the class name.

    `place` says where the class is from, for a refusal.
    """
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
    # a name must be told apart from PATH.py:CLASS, from a path, and from a list of drafters
    is_word = (
        isinstance(kind, str)
        and kind
        and not PLACE_AND_CLASS.fullmatch(kind)
        and not {",", "/"} & set(kind)
    )
    if not is_word:
        raise ValueError(
            f"{place}: {method.__name__} has the name {kind!r}, expected a word: write a class Settings(Section) with "
            'kind: Literal["mymethod"] = "mymethod"'
        )
    return kind


def describe_code(method: type[Any]) -> dict[str, str] | None:
    """Return what a head's config notes of its method's code: a file with its checksum, or an installed package.

    None says that the method is one of this package.
    """
    module = sys.modules.get(method.__module__)
    # set by `_run`, for a method that was read from a single file
    text = getattr(module, "__code_text__", None)
    if text:
        name = Path(str(getattr(module, "__file__", METHOD_FILE))).name
        return {"file": name, "class": method.__name__, "sha256": checksum(text)}
    top = method.__module__.split(".")[0]
    if top == __name__.split(".")[0]:
        return None
    # None too for a class that no installed package brings, such as one of a script
    package = _find_package(top)
    return (
        None
        if package is None
        else {"module": method.__module__, "class": method.__name__, "package": package}
    )


@cache
def _find_package(module: str) -> str | None:
    """Return the name and version of the installed package that brings a module; cached, as it lists all packages."""
    packages = packages_distributions().get(module)
    return f"{packages[0]} {version(packages[0])}" if packages else None


def code_text(method: type[Any]) -> bytes | None:
    """Return the text of the file that a method was read from; None where it is installed or this package's."""
    return getattr(sys.modules.get(method.__module__), "__code_text__", None)


def checksum(text: bytes) -> str:
    """Return the SHA-256 of a file's text."""
    return hashlib.sha256(text).hexdigest()


def _read_code(folder: Path, code: dict[str, str]) -> bytes:
    """Return the code in a head's folder; refuse code that was altered after the head was saved."""
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
    """Return the file that a method was read from by this module; None for one that Python imported."""
    module = sys.modules.get(method.__module__)
    return getattr(module, "__file__", None) if hasattr(module, "__code_text__") else None


def _lies_in(point: EntryPoint, folder: Path | None) -> bool:
    """Return whether the package of an entry point is in a folder."""
    if folder is None or point.dist is None:
        return False
    return Path(str(point.dist.locate_file(""))).resolve().is_relative_to(folder.resolve())


def _package_of(point: EntryPoint) -> str:
    """Return the name and version of the package with an entry point; its object's place if the package is unknown."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
