"""A second service: it hears of paid orders by events, and keeps a ledger of its own."""
