"""What serves FairScale's names: fsshard's own implementation, or the real library with fsshard's mends.

The choice is made once, before anything of :mod:`fsshard.compat.fairscale` is imported, by :func:`use` or by the
environment variable ``FSSHARD_FAIRSCALE``. It holds in all processes below this one: :func:`use` sets the variable,
and children inherit it. The real library is never used unless it is asked for.
"""

from __future__ import annotations

import os
import sys

from fsshard.errors import ConfigurationError, MissingExtra

from .errors import RedirectError
from .not_served import FRONT

__all__ = ["ENGINES", "VARIABLE", "check", "chosen", "serve", "server", "use"]

VARIABLE = "FSSHARD_FAIRSCALE"
ENGINES = ("native", "real")

_in_force: str | None = None  # since the front was imported


def use(engine: str) -> None:
    """Choose what serves FairScale's names, in this process and in those that it starts from now on.

    Args:
        engine: ``"native"``, fsshard's implementation, which is the default; or ``"real"``, FairScale 0.4.13, where
            OSS and ShardedDataParallel have fsshard's mends: to compare the two.

    Raises:
        ConfigurationError: ``engine`` is neither.
        MissingExtra: FairScale is not installed.
        RedirectError: too late: something of fsshard.compat.fairscale is imported already, or multiprocessing's fork
            server runs already, with the other choice.
    """
    _check(engine, "fsshard.compat.use()")
    if _in_force not in (None, engine):
        raise RedirectError(
            f"use({engine!r}) comes too late: {FRONT} is imported already, and {_in_force!r} serves it; call use() "
            f"before the first import of fairscale, or set {VARIABLE}={engine}"
        )
    if engine != (os.environ.get(VARIABLE) or "native") and _fork_server_runs():
        raise RedirectError(
            f"use({engine!r}) comes too late: multiprocessing's fork server runs already, and its children would have "
            f"the other choice; call use() before the first process is started, or set {VARIABLE}={engine}"
        )
    os.environ[VARIABLE] = engine


def chosen() -> str:
    """``"native"`` or ``"real"``.

    Raises:
        ConfigurationError: the environment says something else.
    """
    engine = os.environ.get(VARIABLE) or "native"
    if engine not in ENGINES:
        raise ConfigurationError(f"{VARIABLE}={engine}: expected {' or '.join(ENGINES)}")
    return engine


def check() -> None:
    """Raise what importing :mod:`fsshard.compat.fairscale` would."""
    _check(chosen(), f"{VARIABLE}=real")


def serve() -> None:
    """Put the choice in force, for good; the front calls this before it imports any part of itself."""
    global _in_force
    check()
    if chosen() == "real":
        from . import real_front

        real_front.install()
    _in_force = chosen()


def server(served: str) -> str:
    """What the report says has served the modules of a package."""
    return "the real FairScale, mended by fsshard" if served == FRONT and chosen() == "real" else served


def _check(engine: str, purpose: str) -> None:
    if engine not in ENGINES:
        raise ConfigurationError(f"fsshard.compat.use({engine!r}): expected {' or '.join(map(repr, ENGINES))}")
    if engine == "real":
        from . import real  # not at the top: it puts a finder on sys.meta_path

        if not real.is_installed():
            raise MissingExtra("fairscale", "fairscale", purpose)


def _fork_server_runs() -> bool:
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    return getattr(server, "_forkserver_pid", None) is not None
