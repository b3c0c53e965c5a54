"""Ranks that many wrong backends have one after the other: their processes start once."""

from typing import Any, ClassVar

from anychip.conformance.ranks import Answer, Ranks


class SharedRanks(Ranks):
    """In place of Ranks: whoever asks finds the processes of those who asked before."""

    running: ClassVar[dict[int, Ranks]] = {}

    def start(self) -> None:
        """Whoever asks first starts them."""

    def ask(self, question: str, *, limit_s: float = 60.0, **arguments: Any) -> list[Answer]:
        ranks = self.running.setdefault(self.world_size, Ranks(self.backend, self.world_size))
        if ranks.backend is not self.backend:
            ranks.become(self.backend)
        return ranks.ask(question, limit_s=limit_s, **arguments)

    @classmethod
    def end(cls) -> None:
        """Ends all processes."""
        while cls.running:
            cls.running.popitem()[1].close()
