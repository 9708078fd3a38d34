"""The order book's arithmetic: what orders are, which offers cover a wish, and who trades with whom.

Pure: no Django, no clock, no randomness. `orders` has the words, `cover` finds the cheapest cover of one bid, `basket`
that of a bid over several islands, `packing` fills asks that are sold whole, and `clearing` puts them together.
"""

from marketplace.trading.matching.clearing import Book, Cancel, Outcome, match
from marketplace.trading.matching.orders import Ask, Basket, Bid, Colocation, Fill, Tif

__all__ = ["Ask", "Basket", "Bid", "Book", "Cancel", "Colocation", "Fill", "Outcome", "Tif", "match"]
