"""Fairness between Opens: who came first is served first, whichever session he is of."""

from collections import Counter

from pagekeeper.common.ids import Epoch, SequenceId

LAPSE_AFTER_MESSAGES = 1024
"""A ticket lapses when its session does not renew it while so many messages of other sessions pass, so that a stopped
runner keeps nobody waiting. Messages are counted and not seconds: policy knows no clock. A runner with nothing else to
do retries every 5 ms, so this is 5 s at least: longer than a step with a long prefill on a CPU."""

_Key = tuple[Epoch, SequenceId]


class OpenTickets:
    """Opens that were refused for shortage, in the order in which each was first tried."""

    def __init__(self, lapse_after: int = LAPSE_AFTER_MESSAGES) -> None:
        self._lapse_after = lapse_after
        self._renewed_at: dict[_Key, int] = {}
        """In the order of the first attempts; the messages of other sessions when each was last tried."""
        self._num_messages: Counter[Epoch] = Counter()
        self._total_messages = 0

    def count_message(self, epoch: Epoch) -> None:
        """Every message of every session moves the tickets of the others towards their end."""
        self._num_messages[epoch] += 1
        self._total_messages += 1

    def may_try(self, epoch: Epoch, sequence: SequenceId) -> bool:
        """Whether no older Open waits. Drops the lapsed tickets that stand before this one."""
        for key in list(self._renewed_at):
            if key == (epoch, sequence):
                break
            if not self._has_lapsed(key):
                return False
            del self._renewed_at[key]
        return True

    def wait(self, epoch: Epoch, sequence: SequenceId) -> None:
        """Draw a ticket for an Open that was refused, or renew the one it has, which keeps its place."""
        key = (epoch, sequence)
        if key in self._renewed_at and self._has_lapsed(key):
            del self._renewed_at[key]
        self._renewed_at[key] = self._messages_of_others(epoch)

    def withdraw(self, epoch: Epoch, sequence: SequenceId) -> None:
        """The Open waits no longer: it succeeded, was given up, or can never succeed."""
        self._renewed_at.pop((epoch, sequence), None)

    def withdraw_all(self, epoch: Epoch) -> None:
        """The session has ended."""
        for key in [key for key in self._renewed_at if key[0] == epoch]:
            del self._renewed_at[key]
        del self._num_messages[epoch]

    def _messages_of_others(self, epoch: Epoch) -> int:
        return self._total_messages - self._num_messages[epoch]

    def _has_lapsed(self, key: _Key) -> bool:
        return self._messages_of_others(key[0]) - self._renewed_at[key] >= self._lapse_after
