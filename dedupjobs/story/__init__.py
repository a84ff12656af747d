"""A job's story in words: what happened, why it is where it is, and what comes next."""
