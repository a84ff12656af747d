"""The sample project: a small shop whose payments are charged once, whatever happens."""
