"""What is wrong with a request, field by field."""

from collections.abc import Sequence

from pagekeeper.common.errors import FieldViolation, InvalidRequestError

# An answer's details travel in trailing metadata, which peers limit to 8 KiB.
_MAX_VIOLATIONS = 16


class Violations:
    """Collects what is wrong, up to a number that an answer can carry."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    @property
    def are_enough(self) -> bool:
        """Whether no more are taken."""
        return len(self._found) >= _MAX_VIOLATIONS

    def unless(self, right: bool, field: str, description: str) -> None:
        """Note `description` as what `field` should be, unless it is right."""
        if not right and not self.are_enough:
            self._found.append(FieldViolation(field, description))

    def raise_if_any(self) -> None:
        """Raise InvalidRequestError with everything that is wrong so far."""
        if self._found:
            raise InvalidRequestError(*self._found)

    def unless_token_ids(self, field: str, token_ids: Sequence[int], vocab_size: int) -> None:
        """Note each that is not in the vocabulary by its place; what is wrong is not looked at to its end."""
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            return
        for index, token_id in enumerate(token_ids):
            if self.are_enough:
                return
            self.unless_token_id(f"{field}[{index}]", token_id, vocab_size)

    def unless_token_id(self, field: str, token_id: int, vocab_size: int) -> None:
        """Note a token id that is not in the vocabulary."""
        is_right = 0 <= token_id < vocab_size
        self.unless(is_right, field, f"{token_id} is not a token id; they are 0 to {vocab_size - 1}")
