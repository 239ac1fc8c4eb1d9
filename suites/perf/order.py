"""The order of starts: A B B A B A A B ..., so that drift of any smooth form cancels over pairs."""


def head_first(pair: int) -> bool:
    """Whether the head goes first in pair `pair` (from 0): the Thue-Morse sequence.

    Its sums over 2**k pairs cancel polynomial drift up to degree k - 1 (Prouhet).
    """
    return pair.bit_count() % 2 == 1


def arms_of(pair: int) -> tuple[str, str]:
    """The arms of a pair in the order in which they start."""
    return ("B", "A") if head_first(pair) else ("A", "B")
