"""Paddle's own role makers, which an unchanged Fleet program gives to `fleet.init`; known without importing Paddle."""

from __future__ import annotations

from typing import Any

from common.errors import UsageError

__all__ = ["arguments_of", "is_user_defined", "refuse_servers"]


def is_user_defined(role_maker: Any) -> bool:
    """Whether the program itself says who is what; else the launcher's environment does."""
    return any(kind.__name__ == "UserDefinedRoleMaker" for kind in type(role_maker).__mro__)


def arguments_of(role_maker: Any) -> dict[str, Any]:
    """What the program made one of Paddle's role makers with.

    Raises:
        UsageError: it is none.
    """
    found = vars(role_maker) if hasattr(role_maker, "__dict__") else {}
    if "_is_collective" not in found:
        raise UsageError(
            f"fleet.init: a {type(role_maker).__name__} is no role maker; give it "
            "fleet.PaddleCloudRoleMaker(is_collective=True), or only is_collective=True"
        )
    return {**(found.get("_kwargs") or {}), "is_collective": bool(found["_is_collective"])}


def refuse_servers(role_maker: Any) -> None:
    """
    Raises:
        UsageError: a role maker of Paddle's that asks for parameter servers, where there are none.
    """
    if getattr(role_maker, "_is_collective", True) is False:
        raise UsageError(
            "a parameter-server program cannot run as a ring: run it with ps; or, if it needs no servers, make its "
            f"{type(role_maker).__name__} with is_collective=True"
        )
