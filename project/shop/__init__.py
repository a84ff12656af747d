"""One product, one Buy button, one webhook."""
