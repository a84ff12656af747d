"""A database backend: Django's for SQLite, whose transactions a simulated world watches."""
