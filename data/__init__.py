"""Where data come from: one interface for all domains, and a package of readers and generators for each."""
