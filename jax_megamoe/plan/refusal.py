"""Why a kernel cannot run a call, as a value: an edge makes an exception of it."""

from dataclasses import dataclass

from jax_megamoe._checks import message


@dataclass(frozen=True)
class Refusal:
    """A broken rule of a kernel.

    Attributes:
        reason: argument, what was expected, what was got, and what to do.
        is_missing: the kernel has no such feature (NotImplementedError), rather than a size that
            does not fit (ValueError).
    """

    reason: str
    is_missing: bool = False

    def __str__(self) -> str:
        return self.reason

    def error(self) -> Exception:
        """The exception of an edge."""
        return NotImplementedError(self.reason) if self.is_missing else ValueError(self.reason)


def unfit(argument: str, expected: str, got: object, hint: str = "") -> Refusal:
    """A size or number that does not fit; the reason as `_checks.message` has it."""
    return Refusal(message(argument, expected, got, hint))


def missing(argument: str, expected: str, got: object, hint: str = "") -> Refusal:
    """A feature that the kernel does not have."""
    return Refusal(message(argument, expected, got, hint), is_missing=True)
